// Page of a graph: picture, nodes, refused nodes with reasons, and partitions.

function groupClass(node) {
  if (node.group >= 0) return `p${node.group % 8}`;
  return node.kind === "op" ? "left" : "edge";
}

function groupName(data, node) {
  if (node.group < 0) return node.kind === "op" ? "left out" : node.kind;
  const group = data.groups[node.group];
  return `${group.name}, ${group.backend}`;
}

function partitionsSection(data) {
  const counts = data.groups.map(() => 0);
  for (const node of data.nodes) if (node.group >= 0) counts[node.group] += 1;
  const rows = data.groups.map((group, index) => ({ ...group, index, count: counts[index] }));
  const table = sortableTable(
    "Partitions",
    [
      { title: "partition", value: (row) => row.name, show: (row) => h("span", {}, h("i", { class: `swatch p${row.index % 8}` }), named(row.name)) },
      { title: "backend", value: (row) => row.backend },
      ...(rows.some((row) => row.specs.length) ? [{ title: "settings", value: (row) => row.specs.join(", ") }] : []),
      { title: "nodes", value: (row) => row.count, show: (row) => count(row.count), number: true, bar: true },
      { title: "blob", value: (row) => row.nbytes ?? -1, show: (row) => (row.nbytes === null ? "" : bytes(row.nbytes)), number: true },
    ],
    rows,
    rows.some((row) => row.specs.length) ? 3 : 2,
  );
  return section("partitions", "Partitions", null, rows.length ? table.element : h("p", { class: "none" }, "Nothing is delegated."));
}

function leftOutSection(data) {
  const rows = new Map();
  for (const node of data.nodes) {
    if (!node.reason) continue;
    const key = JSON.stringify([node.label, node.reason]);
    if (!rows.has(key)) rows.set(key, { label: node.label, reason: node.reason, count: 0 });
    rows.get(key).count += 1;
  }
  const table = sortableTable(
    "Left out",
    [
      { title: "operator", value: (row) => row.label },
      { title: "nodes", value: (row) => row.count, show: (row) => count(row.count), number: true, bar: true },
      { title: "why", value: (row) => row.reason, show: (row) => named(row.reason, { class: "reason" }) },
    ],
    [...rows.values()],
    1,
  );
  return section("left", "Left out, and why", rows.size ? null : "Every operator is in a partition.", rows.size ? table.element : null);
}

function showPage(data) {
  const haystacks = data.nodes.map((node) =>
    `${node.name} ${node.label} ${groupName(data, node)} ${node.type} ${node.place} ${node.reason} ${node.constants.join(" ")}`.toLowerCase(),
  );
  const all = data.nodes.map((_, index) => index);
  const only = h("input", { type: "checkbox", id: "only-left-out", onchange: () => search(box.value) });
  const counter = h("p", { class: "counter", role: "status" });
  const detail = h("div", { class: "detail", role: "region", "aria-label": "Chosen node", "aria-live": "polite" });
  const graph = new GraphView({
    describe: (index) => {
      const node = data.nodes[index];
      return [`${node.name}  ${node.label === node.name ? "" : node.label}`, groupName(data, node), node.type, node.place, node.reason].filter(Boolean);
    },
    picked: (index) => {
      if (!list.point(index)) {
        only.checked = false;
        box.value = "";
        search("");
        list.point(index);
      }
      explain(index);
    },
  });
  graph.show(data.nodes.map((node) => ({ label: node.label, needs: node.needs, tone: groupClass(node), round: node.kind !== "op" })));
  const list = new VirtualList({
    label: "Nodes in order",
    className: "graph-nodes",
    render: (index) => {
      const node = data.nodes[index];
      return [
        h("i", { class: `swatch ${groupClass(node)}`, title: groupName(data, node) }),
        h("span", { class: "index" }, count(index)),
        named(node.label, { class: "op" }),
        named(node.type, { class: "args type" }),
        node.reason ? named(node.reason, { class: "args reason" }) : named(groupName(data, node), { class: "args" }),
      ];
    },
    picked: (index) => {
      graph.choose(index, false);
      explain(index);
    },
    numbers: data.nodes.length,
  });

  function explain(index) {
    const node = data.nodes[index];
    const links = (title, others) =>
      others.length
        ? [h("h4", {}, title), h("ul", { class: "values" }, others.slice(0, 100).map((other) => h("li", {}, h("button", { type: "button", onclick: () => graph.choose(other) }, named(data.nodes[other].name)), " ", named(data.nodes[other].type))))]
        : [];
    detail.replaceChildren(
      h("h3", {}, named(node.name)),
      h("p", {}, named(node.label, { class: "op" })),
      h("p", {}, named(node.type, { class: "args" })),
      h("p", {}, h("i", { class: `swatch ${groupClass(node)}` }), named(groupName(data, node))),
      ...(node.reason ? [h("p", { class: "reason" }, named(node.reason))] : []),
      ...(node.place ? [h("p", { class: "none" }, named(node.place))] : []),
      ...links("needs", node.needs),
      ...(node.constants.length ? [h("h4", {}, "weights"), h("ul", { class: "values" }, node.constants.map((name) => h("li", {}, named(name))))] : []),
      ...links("read by", graph.readers[index]),
    );
  }

  function search(query) {
    const words = wordsOf(query);
    const found = all.filter((index) => words.every((word) => haystacks[index].includes(word)) && (!only.checked || data.nodes[index].reason));
    list.show(found);
    graph.highlight(words.length || only.checked ? new Set(found) : null);
    counter.textContent = `${count(found.length)} of ${plural(all.length, "node")}`;
  }

  const ops = data.nodes.filter((node) => node.kind === "op");
  const delegated = ops.filter((node) => node.group >= 0).length;
  const box = searchBox(search, "Search nodes, operators, partitions, reasons, module paths and source lines");
  const legend = data.groups.slice(0, 8).map((group, index) => h("li", {}, h("i", { class: `swatch p${index}` }), named(group.name)));
  const more = data.groups.length > 8 ? [h("li", {}, `and ${data.groups.length - 8} more, in the same colours again`)] : [];
  document.getElementById("page").append(
    topBar(named(data.title), [], () => {}, box, [["graph", "Graph"], ["nodes", "Nodes"], ["left", "Left out"], ["partitions", "Partitions"]]),
    tiles([
      ["operators", count(ops.length)],
      ["delegated", count(delegated), percent(delegated, ops.length)],
      ["left out", count(ops.length - delegated)],
      ["partitions", count(data.groups.length)],
    ]),
    h(
      "main",
      {},
      section(
        "graph",
        "Graph",
        null,
        graph.element,
        h("ul", { class: "legend" }, ...legend, ...more, h("li", {}, h("i", { class: "swatch left" }), "left out"), h("li", {}, h("i", { class: "swatch edge" }), "input or output")),
      ),
      section("nodes", "Nodes", null, h("div", { class: "tools" }, h("label", {}, only, " left out only"), counter), h("div", { class: "split" }, list.element, detail)),
      leftOutSection(data),
      partitionsSection(data),
    ),
  );
  detail.append(h("p", { class: "none" }, "Choose a node to see what it needs, who reads it, and where it comes from."));
  search("");
}
