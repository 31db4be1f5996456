// Sortable tables.

const MOST_ROWS = 500;

/** `columns` are {title, value(row), show(row)?, number?, rising?, bar?}; returns {element, filter}. */
function sortableTable(label, columns, rows, sortedBy = 0) {
  let order = { column: sortedBy, down: columns[sortedBy].number && !columns[sortedBy].rising };
  let shown = rows;
  const body = h("tbody");
  const heads = columns.map((column, index) =>
    h(
      "th",
      { scope: "col", class: column.number ? "number" : null },
      h("button", { type: "button", onclick: () => sort(index) }, column.title),
    ),
  );

  function sort(index) {
    order = { column: index, down: order.column === index ? !order.down : Boolean(columns[index].number && !columns[index].rising) };
    draw();
  }

  function draw() {
    const { value } = columns[order.column];
    const compare = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
    const sorted = [...shown].sort((a, b) => (order.down ? compare(b, a) : compare(a, b)));
    heads.forEach((head, index) => {
      const way = order.down ? "descending" : "ascending";
      head.setAttribute("aria-sort", index === order.column ? way : "none");
    });
    const most = columns.map((column) =>
      column.bar ? rows.reduce((top, row) => Math.max(top, column.value(row)), 1) : 0,
    );
    body.replaceChildren(
      ...sorted.slice(0, MOST_ROWS).map((row) =>
        h(
          "tr",
          {},
          columns.map((column, index) => cell(column, row, most[index])),
        ),
      ),
    );
    if (sorted.length > MOST_ROWS) {
      const rest = `and ${count(sorted.length - MOST_ROWS)} more`;
      body.append(h("tr", {}, h("td", { colspan: columns.length, class: "none" }, rest)));
    }
    if (!sorted.length) body.append(h("tr", {}, h("td", { colspan: columns.length, class: "none" }, "none")));
  }

  draw();
  const table = h(
    "table",
    {},
    h("caption", { class: "visually-hidden" }, label),
    h("thead", {}, h("tr", {}, heads)),
    body,
  );
  return {
    element: h("div", { class: "table", tabindex: "0", role: "region", "aria-label": label }, table),
    filter(keep) {
      shown = rows.filter(keep);
      draw();
      return shown.length;
    },
  };
}

function cell(column, row, most) {
  const content = column.show ? column.show(row) : String(column.value(row));
  if (!column.number) return h("td", {}, typeof content === "string" ? named(content) : content);
  const bar = column.bar
    ? h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width: `${(100 * column.value(row)) / most}%` } }))
    : null;
  return h("td", { class: "number" }, bar, h("span", {}, content));
}
