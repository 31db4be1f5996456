// Page of one file.

/** Operators with their times from a trace, including delegates and the operators in them. */
function timedOperators(method) {
  const rows = new Map(method.data.operators.map((operator) => [operator.name, { ...operator, time: 0 }]));
  const add = (name, time, calls) => {
    if (!rows.has(name)) rows.set(name, { name, calls: 0, written: 0, read: 0, time: 0 });
    rows.get(name).time += time;
    rows.get(name).calls += calls;
  };
  for (let index = 0; index < method.length; index += 1) {
    const watched = method.watched(index);
    if (!watched) continue;
    add(method.label(index), watched.time, method.isDelegate(index) ? 1 : 0);
    const parts = method.parts(index);
    watched.parts.forEach((time, part) => {
      if (time !== null) add(`${method.label(index)}: ${partTexts(parts[part] ?? `operator ${part}`)[0]}`, time, 1);
    });
  }
  return [...rows.values()];
}

function operatorsSection(method) {
  const timed = Boolean(method.times);
  const table = sortableTable(
    "Operators",
    [
      { title: "operator", value: (row) => row.name },
      ...(timed ? [{ title: "time", value: (row) => row.time, show: (row) => microseconds(row.time), number: true, bar: true }] : []),
      { title: "calls", value: (row) => row.calls, show: (row) => count(row.calls), number: true, bar: true },
      { title: "bytes written", value: (row) => row.written, show: (row) => bytes(row.written), number: true, bar: true },
      { title: "bytes read", value: (row) => row.read, show: (row) => bytes(row.read), number: true },
    ],
    timed ? timedOperators(method) : method.data.operators,
    1,
  );
  return {
    filter: table.filter,
    element: section("operators", "Operators", timed ? OPERATORS_TIMED : OPERATORS_ABOUT, table.element),
  };
}

function delegatesSection(method) {
  const { delegates } = method.data;
  const graphOf = (delegate) => method.file.texts[delegate.graph];
  const inside = (delegate) => {
    const specs = delegate.specs.length
      ? h("ul", {}, delegate.specs.map((spec) => h("li", {}, named(spec.key), " = ", h("code", {}, spec.value))))
      : "no compile specs";
    const preview = delegate.preview.text ?? delegate.preview.hex;
    return [
      delegate.ops.length ? h("p", {}, "operators inside: ", named(delegate.ops.map(([name, times]) => `${times} × ${name}`).join(", "))) : null,
      delegate.graph >= 0 ? h("pre", { class: "graph", tabindex: "0" }, graphOf(delegate)) : null,
      delegate.closed ? h("p", { class: "none" }, "not opened, as ", named(delegate.closed)) : null,
      h("p", {}, specs),
      preview ? h("pre", { tabindex: "0" }, preview + (delegate.preview.more ? "\n…" : "")) : null,
    ];
  };
  const figures = ({ nbytes, calls, ops }) =>
    [...(ops.length ? [plural(sum(ops.map(([, times]) => times)), "operator")] : []), bytes(nbytes), plural(calls, "call")].join(" · ");
  const items = delegates.slice(0, 500).map((delegate, index) =>
    h(
      "details",
      // A single delegate is shown open.
      { open: delegates.length === 1 },
      h("summary", {}, h("span", { class: "index" }, `${index} `), named(delegate.id, { class: "op" }), h("span", { class: "size" }, figures(delegate))),
      ...inside(delegate),
    ),
  );
  const none = delegates.length ? null : h("p", { class: "none" }, "Nothing of this method is delegated.");
  const more = delegates.length > 500 ? h("p", { class: "none" }, `and ${delegates.length - 500} more`) : null;
  return {
    filter: (query) => {
      items.forEach((item, index) => {
        const text = `${delegates[index].id} ${delegates[index].ops.join(" ")} ${graphOf(delegates[index]) ?? ""} ${delegates[index].preview.text ?? ""}`;
        item.hidden = !wordsOf(query).every((word) => text.toLowerCase().includes(word));
      });
    },
    element: section("delegates", "Delegates", delegates.length ? "Open one for its settings, its operators where they can be told, and its first bytes." : null, ...items, none, more),
  };
}

const OPERATORS_ABOUT = "How often each kernel is called, and how many bytes its tensors hold, over one run without loops.";
const OPERATORS_TIMED = `${OPERATORS_ABOUT} Times are of one call in lowerdeck.runner, which emulates the runtime: no speed of a device.`;
const SEARCHED = "Search instructions, values, operators, delegates, stored names and source lines";
const PARTS = [
  ["graph", "Graph"],
  ["memory", "Memory"],
  ["instructions", "Instructions"],
  ["operators", "Operators"],
  ["delegates", "Delegates"],
  ["file", "File"],
];

function signature(method) {
  const list = (values) => values.map((value) => method.long(value)).join(", ") || "nothing";
  return h(
    "p",
    { class: "signature" },
    named(method.name, { class: "op" }),
    ": ",
    named(list(method.data.inputs)),
    " → ",
    named(list(method.data.outputs)),
  );
}

function showReport(data) {
  const file = new FileModel(data.file);
  const map = fileMapSection(file);
  const facts = file.facts();
  const place = h("main", { id: "method-parts" });
  let parts = null;

  function show(index) {
    const method = file.methods[index];
    if (!method) {
      place.replaceChildren(h("p", { class: "none" }, "This file has no method."), map.element);
      return;
    }
    const instructions = new InstructionsView(
      method,
      (chosen, entry) => {
        memory.views.forEach((view) => view.markTime(chosen));
        graph.point(entry);
      },
      oncePerFrame(() => graph.show()),
    );
    const graph = new InstructionGraph(method, instructions);
    const memory = memoryViews(method, (chosen) => instructions.open(chosen));
    const operators = operatorsSection(method);
    const delegates = delegatesSection(method);
    parts = { method, instructions, graph, memory, operators, delegates };
    place.replaceChildren(
      signature(method),
      graph.element,
      section("memory", "Memory over time", MEMORY_ABOUT, ...memory.elements),
      instructions.element,
      operators.element,
      delegates.element,
      map.element,
    );
    search(box.value);
  }

  function search(query) {
    map.filter(query);
    if (!parts) return;
    const kept = parts.instructions.filter(query);
    parts.graph.highlight(parts.instructions.hits);
    const words = wordsOf(query);
    parts.operators.filter((row) => words.every((word) => row.name.toLowerCase().includes(word)));
    parts.delegates.filter(query);
    const touched = words.length ? new Set(kept.flatMap((index) => parts.method.split(index).made.concat(parts.method.isDelegate(index) ? parts.method.arguments(index) : []))) : null;
    parts.memory.views.forEach((view) => view.highlight(touched));
  }

  const box = searchBox(search, SEARCHED);
  document.getElementById("page").append(
    topBar(named(file.title), file.methods.map((method) => method.name), show, box, PARTS),
    tiles([
      ["file", facts.size === null ? "not written" : bytes(facts.size)],
      ["methods", count(facts.methods)],
      ["instructions", count(facts.instructions)],
      ["operators", count(facts.operators)],
      ["delegates", count(facts.delegates), facts.delegates ? bytes(facts.delegateBytes) : null],
      ["constants and named data", bytes(facts.constantBytes)],
      ["planned memory", bytes(facts.planned)],
    ]),
    place,
  );
  show(0);
}
