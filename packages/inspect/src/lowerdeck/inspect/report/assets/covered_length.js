// Length of the union of a changing set of intervals.

/** Segment tree over the interval ends that counts the intervals covering each node. */
class CoveredLength {
  constructor(intervals) {
    this.ends = [...new Set(intervals.flat())].sort((a, b) => a - b);
    this.counts = new Int32Array(4 * this.ends.length + 4);
    this.covered = new Float64Array(4 * this.ends.length + 4);
    this.places = new Map(this.ends.map((end, index) => [end, index]));
  }

  get length() {
    return this.covered[1];
  }

  add(start, end, by) {
    if (start < end) this.change(1, 0, this.ends.length - 1, this.places.get(start), this.places.get(end), by);
  }

  /** Node `at` covers the range between the ends `low` and `high`. */
  change(at, low, high, from, to, by) {
    if (from <= low && high <= to) this.counts[at] += by;
    else {
      const middle = (low + high) >> 1;
      if (from < middle) this.change(2 * at, low, middle, from, to, by);
      if (to > middle) this.change(2 * at + 1, middle, high, from, to, by);
    }
    if (this.counts[at] > 0) this.covered[at] = this.ends[high] - this.ends[low];
    else this.covered[at] = high - low > 1 ? this.covered[2 * at] + this.covered[2 * at + 1] : 0;
  }
}
