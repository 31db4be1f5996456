// Numbers as a person reads them.

const formatter = new Intl.NumberFormat("en-US");

function count(number) {
  return Number.isSafeInteger(number) ? formatter.format(number) : number.toExponential(3);
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function bytes(number) {
  if (Math.abs(number) < 1024) return `${count(number)} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let scaled = number;
  let unit = -1;
  while (Math.abs(scaled) >= 1024 && unit < units.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  const digits = Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)} ${units[unit]}`;
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
  return before ? `${difference} (${sign}${percent(Math.abs(after - before), before)})` : difference;
}

function sum(numbers) {
  let total = 0;
  for (const number of numbers) total += number;
  return total;
}

/** Round steps between `from` and `to` for an axis of at most `most` marks. */
function ticks(from, to, most, base = 10) {
  const span = Math.max(to - from, 1e-9);
  let step = base ** Math.floor(Math.log(span / most) / Math.log(base));
  const factors = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  step *= factors.find((factor) => span / (step * factor) <= most) ?? base;
  step = Math.max(step, 1);
  const marks = [];
  for (let mark = Math.ceil(from / step) * step; mark <= to; mark += step) marks.push(mark);
  return marks;
}
