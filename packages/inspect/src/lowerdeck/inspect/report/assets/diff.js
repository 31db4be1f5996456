// Page that compares two files side by side.

const MARKS = { removed: "−", added: "+", changed: "≠", same: "" };

function summaryTable(facts) {
  const [old, fresh] = facts;
  const rows = [
    ["file size", "size", bytes],
    ["methods", "methods", count],
    ["instructions", "instructions", count],
    ["operators", "operators", count],
    ["delegates", "delegates", count],
    ["bytes for delegates", "delegateBytes", bytes],
    ["constants and named data", "constantBytes", bytes],
    ["planned memory", "planned", bytes],
  ];
  const show = (value, format) => (value === null ? "not written" : format(value));
  return h(
    "div",
    { class: "table" },
    h(
      "table",
      {},
      h("caption", { class: "visually-hidden" }, "Summary of both files"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), ["old", "new", "change"].map((t) => h("th", { scope: "col", class: "number" }, t)))),
      h(
        "tbody",
        {},
        rows.map(([title, key, format]) =>
          h(
            "tr",
            { class: old[key] === fresh[key] ? null : "changed" },
            h("th", { scope: "row" }, title),
            h("td", { class: "number" }, show(old[key], format)),
            h("td", { class: "number" }, show(fresh[key], format)),
            h("td", { class: "number" }, old[key] === null || fresh[key] === null ? "" : change(old[key], fresh[key], format)),
          ),
        ),
      ),
    ),
  );
}

class PairedInstructions {
  constructor(old, fresh, rows) {
    Object.assign(this, { old, fresh, query: "" });
    this.rows = joinNeighbours(rows, old, fresh).flatMap((row) => withParts(row, old, fresh));
    this.only = h("input", { type: "checkbox", id: "only-differences", onchange: () => this.filter(this.query) });
    this.counter = h("p", { class: "counter", role: "status" });
    this.list = new VirtualList({
      label: "Instructions of both files side by side",
      className: old.times && fresh.times ? "sides with-errors" : "sides",
      render: (row) => this.row(row),
      picked: (row) => this.pick(row),
      numbers: Math.max(old.length, fresh.length),
    });
    // The class of a changed row is set on the row element.
    const plain = this.list.row.bind(this.list);
    this.list.row = (index) => {
      const element = plain(index);
      if (this.list.items[index].state !== "same") element.classList.add(this.list.items[index].state);
      return element;
    };
    this.detail = h("div", { class: "pair", role: "region", "aria-label": "Chosen instructions", "aria-live": "polite" });
    this.element = section(
      "instructions",
      "Instructions",
      `Old on the left, new on the right; paired where operator and types of arguments are equal.${old.times && fresh.times ? " To the right how far the new results are from the old ones, by some numbers of each." : ""}`,
      h("div", { class: "tools" }, h("label", {}, this.only, " differences only"), this.counter),
      this.list.element,
      this.detail,
    );
    this.filter("");
  }

  side(method, index, part) {
    const which = method === this.old ? "left" : "right";
    if (index < 0 || part === null) return [h("span", { class: which }, ""), h("span", { class: which }, "")];
    if (part !== undefined) {
      return [h("span", { class: which }, ""), named(partTexts(part).join("  "), { class: `op part ${which}` })];
    }
    return [
      h("span", { class: `index ${which}` }, count(index)),
      named(`${method.label(index)}  ${method.summary(index)}`, { class: `op ${which}` }),
    ];
  }

  row({ left, right, state, parts, places }) {
    return [
      h("b", { "aria-label": state === "same" ? null : state }, MARKS[state]),
      ...this.side(this.old, left, parts?.[0]),
      ...this.side(this.fresh, right, parts?.[1]),
      this.old.times && this.fresh.times ? h("span", { class: "size" }, distanceText(this.distance({ left, right, places }))) : null,
    ];
  }

  /** Relative difference of the new side's samples from the old side's; null without comparable samples. */
  distance({ left, right, places }) {
    const samples = (method, index, place) => (place === undefined ? method.watched(index)?.samples : method.watched(index)?.inside[place]);
    const [one, other] = [samples(this.old, left, places?.[0]), samples(this.fresh, right, places?.[1])];
    if (!one?.length || one.length !== other?.length) return null;
    const known = one.map((value, at) => [value, other[at]]).filter(([a, b]) => a !== null && b !== null);
    if (!known.length) return null;
    const size = Math.sqrt(sum(known.map(([a]) => a * a)));
    const away = Math.sqrt(sum(known.map(([a, b]) => (a - b) ** 2)));
    return away === 0 ? 0 : away / size;
  }

  pick({ left, right, parts }) {
    const half = (method, index, part) => {
      if (part) {
        const [operator, about] = partTexts(part);
        return h("div", {}, h("h3", {}, named(operator)), h("p", {}, named(about, { class: "args" })), h("p", { class: "none" }, `in ${count(index)} ${method.label(index)}`));
      }
      if (index < 0 || part === null) return h("div", {}, h("p", { class: "none" }, "nothing on this side"));
      return h(
        "div",
        {},
        h("h3", {}, `${count(index)} `, named(method.label(index))),
        h("ul", { class: "values" }, method.arguments(index).slice(0, 100).map((value) => h("li", {}, named(method.long(value))))),
        h("p", { class: "none" }, named(method.source(index))),
      );
    };
    this.detail.replaceChildren(half(this.old, left, parts?.[0]), half(this.fresh, right, parts?.[1]));
  }

  filter(query) {
    this.query = query;
    const words = wordsOf(query);
    const holds = (method, index, word, part) => {
      if (part !== undefined) return Boolean(part?.toLowerCase().includes(word));
      return index >= 0 && method.haystack(index).includes(word);
    };
    const kept = this.rows.filter(
      (row) =>
        (!this.only.checked || row.state !== "same") &&
        words.every((word) => holds(this.old, row.left, word, row.parts?.[0]) || holds(this.fresh, row.right, word, row.parts?.[1])),
    );
    this.list.show(kept);
    const different = this.rows.filter((row) => row.state !== "same").length;
    const shown = words.length && !kept.length ? "no hits" : `${count(kept.length)} of ${plural(this.rows.length, "row")} shown`;
    this.counter.textContent = `${plural(different, "difference")}, ${shown}`;
  }
}

function distanceText(distance) {
  if (distance === null) return "";
  if (distance === 0) return "=";
  if (distance < 1e-6) return "< 0.0001 %";
  return `${(100 * distance).toPrecision(2)} %`.replace("Infinity %", "from 0");
}

/** A row, followed by the operators of its delegates if these differ between the sides. */
function withParts(row, old, fresh) {
  const sides = [[old, row.left], [fresh, row.right]];
  const delegates = sides.map(([method, index]) => (index >= 0 && method.isDelegate(index) ? method.delegate(index) : null));
  if (!delegates.some(Boolean)) return [row];
  const [left, right] = sides.map(([method, index]) => (index >= 0 ? method.parts(index) : []));
  const state = ([one, other]) => (one === null ? "added" : other === null ? "removed" : one === other ? "same" : "changed");
  const below = pairedParts(left, right).map(([one, other, ...places]) => ({ ...row, parts: [one, other], places, state: state([one, other]) }));
  const [one, other] = delegates;
  const blob = (delegate) => `${delegate.nbytes} ${JSON.stringify(delegate.preview)}`;
  const changed = below.some((each) => each.state !== "same") || (one && other && blob(one) !== blob(other));
  if (!changed) return old.times && fresh.times ? [row, ...below] : [row];
  return [row.state === "same" ? { ...row, state: "changed" } : row, ...below];
}

/** Pair the operators of two delegates by a longest common subsequence of their names. */
function pairedParts(left, right) {
  const [one, other] = [left, right].map((side) => side.map((text) => partTexts(text)[0]));
  const most = Array.from({ length: one.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i -= 1) {
    for (let j = other.length - 1; j >= 0; j -= 1) {
      most[i][j] = one[i] === other[j] ? most[i + 1][j + 1] + 1 : Math.max(most[i + 1][j], most[i][j + 1]);
    }
  }
  const pairs = [];
  let i = 0;
  let j = 0;
  while (i < one.length || j < other.length) {
    if (i < one.length && j < other.length && one[i] === other[j]) pairs.push([left[i], right[j], i++, j++]);
    else if (j >= other.length || (i < one.length && most[i + 1][j] >= most[i][j + 1])) pairs.push([left[i], null, i++, -1]);
    else pairs.push([null, right[j], -1, j++]);
  }
  return pairs;
}

/** Pair a removed instruction with a nearby added one of the same operator: only its types changed. */
function joinNeighbours(rows, old, fresh) {
  const joined = [];
  let gone = [];
  let come = [];
  const flush = () => {
    let next = 0;
    for (const left of gone) {
      const near = come.slice(next, next + 16).findIndex((right) => old.label(left) === fresh.label(right));
      if (near < 0) joined.push({ left, right: -1, state: "removed" });
      else {
        for (const right of come.slice(next, next + near)) joined.push({ left: -1, right, state: "added" });
        joined.push({ left, right: come[next + near], state: "changed" });
        next += near + 1;
      }
    }
    for (const right of come.slice(next)) joined.push({ left: -1, right, state: "added" });
    gone = [];
    come = [];
  };
  for (const [left, right] of rows) {
    if (left >= 0 && right >= 0) {
      flush();
      joined.push({ left, right, state: "same" });
    } else if (left >= 0) gone.push(left);
    else come.push(right);
  }
  flush();
  return joined;
}

function operatorChanges(old, fresh) {
  const rows = new Map();
  const add = (method, side) => {
    for (const operator of method.data.operators) {
      if (!rows.has(operator.name)) rows.set(operator.name, { name: operator.name, old: 0, fresh: 0, oldBytes: 0, freshBytes: 0 });
      const row = rows.get(operator.name);
      row[side] += operator.calls;
      row[`${side}Bytes`] += operator.written;
    }
  };
  add(old, "old");
  add(fresh, "fresh");
  const number = (title, value, show) => ({ title, value, show, number: true });
  const table = sortableTable(
    "Operators of both files",
    [
      { title: "operator", value: (row) => row.name },
      number("old calls", (row) => row.old, (row) => count(row.old)),
      number("new calls", (row) => row.fresh, (row) => count(row.fresh)),
      number("change", (row) => Math.abs(row.fresh - row.old), (row) => change(row.old, row.fresh)),
      number("old bytes written", (row) => row.oldBytes, (row) => bytes(row.oldBytes)),
      number("new bytes written", (row) => row.freshBytes, (row) => bytes(row.freshBytes)),
    ],
    [...rows.values()],
    3,
  );
  return { filter: table.filter, element: section("operators", "Operators", null, table.element) };
}

function storedChanges(changes) {
  const table = sortableTable(
    "What is stored differently",
    [
      { title: "name", value: (row) => row.name },
      { title: "holds", value: (row) => STORED[row.kind] },
      { title: "change", value: (row) => row.change },
      { title: "old", value: (row) => row.old, show: (row) => bytes(row.old), number: true },
      { title: "new", value: (row) => row.new, show: (row) => bytes(row.new), number: true },
    ],
    changes,
    4,
  );
  const about = changes.length ? `${plural(changes.length, "stored item")} not the same in both.` : "Both files store the same bytes under the same names.";
  return section("stored", "Stored", about, changes.length ? table.element : null);
}

function emptyMethod(file, name) {
  return new Method(file, {
    name,
    inputs: [],
    outputs: [],
    values: { text: [], name: [], role: "", nbytes: [], note: [] },
    instructions: { kind: "", target: [], args: [], outs: [], stack: [], stacks: [], chains: [] },
    operators: [],
    delegates: [],
    arenas: [],
  });
}

function showDiff(data) {
  const files = [new FileModel(data.old), new FileModel(data.new)];
  const place = h("main", { id: "method-parts" });
  const stored = storedChanges(data.stored);
  const maps = section(
    "file",
    "What fills the files",
    null,
    ...files.flatMap((file) => [h("h3", {}, named(file.title)), fileStrip(file).element, mapLegend(fillsOf(file), file.size ?? sum(Object.values(fillsOf(file))))]),
  );
  let parts = null;

  function show(index) {
    const pairing = data.methods[index];
    if (!pairing) {
      place.replaceChildren(h("p", { class: "none" }, "Neither file has a method."), stored, maps);
      return;
    }
    const [old, fresh] = files.map((file, side) => file.methods[side ? pairing.new : pairing.old] ?? emptyMethod(file, pairing.name));
    const instructions = new PairedInstructions(old, fresh, pairing.rows);
    const operators = operatorChanges(old, fresh);
    const open = (side) => (time) => {
      instructions.only.checked = false;
      instructions.filter("");
      const row = instructions.rows.findIndex((one) => one[side] === time);
      instructions.list.select(row);
      instructions.list.element.focus();
    };
    const memories = [memoryViews(old, open("left")), memoryViews(fresh, open("right"))];
    const half = (side) => h("div", {}, h("h3", {}, named(files[side].title)), ...memories[side].elements);
    parts = { instructions, operators };
    place.replaceChildren(
      instructions.element,
      section("memory", "Memory over time", MEMORY_ABOUT, h("div", { class: "pair" }, half(0), half(1))),
      operators.element,
      stored,
      maps,
    );
    search(box.value);
  }

  function search(query) {
    if (!parts) return;
    parts.instructions.filter(query);
    const words = wordsOf(query);
    parts.operators.filter((row) => words.every((word) => row.name.toLowerCase().includes(word)));
  }

  const box = searchBox(search, SEARCHED);
  const links = PARTS.filter(([id]) => !["graph", "delegates"].includes(id)).toSpliced(2, 0, ["stored", "Stored"]);
  document.getElementById("page").append(
    topBar([named(files[0].title), " → ", named(files[1].title)], data.methods.map((method) => method.name), show, box, links),
    section("summary", "Summary", null, summaryTable(files.map((file) => file.facts()))),
    place,
  );
  show(0);
}
