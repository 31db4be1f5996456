// Number formats.

const formatter = new Intl.NumberFormat("en-US");

function count(number) {
  return Number.isSafeInteger(number) ? formatter.format(number) : number.toExponential(3);
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Size in decimal units, as in `lowerdeck inspect`. */
function bytes(number) {
  if (Math.abs(number) < 1000) return `${count(number)} B`;
  const units = ["kB", "MB", "GB", "TB", "PB", "EB"];
  let scaled = number / 1000;
  let unit = 0;
  while (Math.abs(scaled) >= 999.95 && unit < units.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  return `${scaled.toFixed(1)} ${units[unit]}`;
}

function microseconds(number) {
  return number < 1000 ? `${number.toFixed(number < 10 ? 1 : 0)} µs` : `${(number / 1000).toFixed(1)} ms`;
}

function percent(part, whole) {
  if (!whole) return "0 %";
  const share = (100 * part) / whole;
  return share > 0 && share < 0.1 ? "< 0.1 %" : `${share.toFixed(share < 10 ? 1 : 0)} %`;
}

function change(before, after, format = count) {
  if (before === after) return "=";
  const sign = after > before ? "+" : "−";
  const difference = `${sign}${format(Math.abs(after - before))}`;
  const share = percent(Math.abs(after - before), before);
  return before ? `${difference} (${share.startsWith("<") ? share : sign + share})` : difference;
}

function sum(numbers) {
  let total = 0;
  for (const number of numbers) total += number;
  return total;
}

/** At most `most` round axis marks between `from` and `to`. */
function ticks(from, to, most) {
  const span = Math.max(to - from, 1e-9);
  let step = 10 ** Math.floor(Math.log10(span / most));
  step *= [1, 2, 5, 10].find((factor) => span / (step * factor) <= most) ?? 10;
  step = Math.max(step, 1);
  const marks = [];
  for (let mark = Math.ceil(from / step) * step; mark <= to; mark += step) marks.push(mark);
  return marks;
}
