// Layered graph layout: each node is in a row below its inputs.

const SWEEPS = 4;

/**
 * Return column and row of each node. `needs` has the inputs of each node, which are earlier nodes. A node is one row
 * below its lowest input. Rows are sorted by the positions of neighbours in a few sweeps down and up, then aligned
 * with them. Columns of a row are at least 1 apart; the leftmost is 0.
 */
function layoutOf(needs) {
  const rows = [];
  for (const needed of needs) rows.push(needed.reduce((most, other) => Math.max(most, rows[other] + 1), 0));
  const levels = Array.from({ length: rows.reduce((most, row) => Math.max(most, row + 1), 0) }, () => []);
  rows.forEach((row, node) => levels[row].push(node));
  const readers = needs.map(() => []);
  needs.forEach((needed, node) => needed.forEach((other) => readers[other].push(node)));
  const columns = new Array(needs.length).fill(0);
  for (const level of levels) {
    level.forEach((node, column) => {
      columns[node] = column - (level.length - 1) / 2;
    });
  }
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const down = sweep % 2 === 0;
    for (const level of down ? levels : levels.toReversed()) settle(level, down ? needs : readers, columns);
  }
  const left = columns.reduce((least, column) => Math.min(least, column), Infinity);
  return columns.map((column, node) => ({ x: column - left, y: rows[node] }));
}

/** Move the nodes of one row close to the mean column of their neighbours. */
function settle(level, neighbours, columns) {
  const wanted = new Map();
  for (const node of level) {
    const near = neighbours[node].map((other) => columns[other]);
    wanted.set(node, near.length ? sum(near) / near.length : columns[node]);
  }
  level.sort((one, other) => wanted.get(one) - wanted.get(other) || columns[one] - columns[other]);
  let free = -Infinity;
  for (const node of level) {
    columns[node] = Math.max(wanted.get(node), free);
    free = columns[node] + 1;
  }
  // Nodes were only moved right: shift the row back by the mean.
  const lean = sum(level.map((node) => columns[node] - wanted.get(node))) / level.length;
  for (const node of level) columns[node] -= lean;
}
