// Graph of a method's instructions: a closed entry of the outline is one box, an open one shows its members.

/** Data flow between inputs, instructions, operators of delegates, and outputs, in topological order. */
class Flow {
  constructor(method, entries) {
    this.needs = [];
    this.inputs = method.data.inputs.map(() => this.add([]));
    this.ofEntry = new Map();
    const writers = new Map(method.data.inputs.map((value, position) => [value, [this.inputs[position]]]));
    // No instruction creates a view: it shares the bytes of other values.
    const views = new Map(method.data.arenas.flatMap((arena) => arena.blocks.map((block) => [block[0], block[5] ?? []])));
    const writersOf = (value) => writers.get(value) ?? (views.get(value) ?? []).flatMap((source) => writers.get(source) ?? []);
    const sources = (values) => {
      const found = values.flatMap((value) => [value, ...(method.data.values.members[value] ?? [])]);
      return [...new Set(found.flatMap(writersOf))];
    };
    let parts = [];
    for (const entry of entries) {
      if (entry.kind === "group") continue;
      const { index } = entry;
      if (entry.kind === "part") {
        const links = method.delegate(index).links[entry.part] ?? [];
        const args = method.arguments(index);
        parts.push(this.add([...new Set(links.flatMap((link) => (link >= 0 ? parts[link] : sources([args[-1 - link]]))))]));
        this.ofEntry.set(entry, parts.at(-1));
        if (parts.length < method.parts(index).length) continue;
        // Results without a known producer are attributed to the delegate's last operator.
        for (const value of method.split(index).made) writers.set(value, [parts.at(-1)]);
        for (const [argument, part] of method.delegate(index).results) writers.set(args[argument], [parts[part]]);
      } else if (entry.parts) {
        parts = [];
      } else {
        const { made, read } = method.split(index);
        this.ofEntry.set(entry, this.add(sources(read)));
        for (const value of made) writers.set(value, [this.ofEntry.get(entry)]);
      }
    }
    this.outputs = method.data.outputs.map((value) => this.add(sources([value])));
  }

  add(needs) {
    return this.needs.push(needs) - 1;
  }
}

class InstructionGraph {
  constructor(method, instructions) {
    Object.assign(this, { method, instructions, outline: instructions.outline, boxes: [], ofEntry: new Map(), toggled: null });
    this.flow = new Flow(method, this.outline.entries);
    this.view = new GraphView({
      describe: (number) => this.describe(this.boxes[number]),
      picked: (number) => this.boxes[number].entry && instructions.choose(this.boxes[number].entry),
      opened: (number) => this.toggle(this.boxes[number].entry, true),
      closed: (number) => this.toggle(this.outline.holderOf(this.boxes[number].entry), false),
      hint: this.outline.hasHolders ? " Two clicks or Enter open a module or a delegate, Backspace closes the one that a box is in." : "",
      tools: instructions.tools(),
    });
    this.element = section("graph", "Graph", method.guessesModules ? MODULES_GUESSED : null, this.view.element);
    this.show();
  }

  /** Draw the current state of the outline. */
  show() {
    const { method, flow } = this;
    const boxOf = new Map();
    const open = (box, ...atoms) => {
      const number = this.boxes.push(box) - 1;
      for (const atom of atoms) boxOf.set(atom, number);
      return number;
    };
    this.boxes = [];
    this.ofEntry = new Map();
    flow.inputs.forEach((atom, position) => open({ value: method.data.inputs[position], what: "input" }, atom));
    let hidden = Infinity;
    let holder = -1;
    for (const entry of this.outline.entries) {
      if (entry.depth <= hidden) {
        const closed = this.outline.closed.has(entry);
        hidden = closed ? entry.depth : Infinity;
        if (closed || !this.outline.holds(entry)) holder = open({ entry });
        else continue;
      }
      this.ofEntry.set(entry, holder);
      if (flow.ofEntry.has(entry)) boxOf.set(flow.ofEntry.get(entry), holder);
    }
    flow.outputs.forEach((atom, position) => open({ value: method.data.outputs[position], what: "output" }, atom));
    const needs = this.boxes.map(() => new Set());
    flow.needs.forEach((needed, atom) => {
      const box = boxOf.get(atom);
      for (const other of needed) if (boxOf.get(other) < box) needs[box].add(boxOf.get(other));
    });
    this.view.show(this.boxes.map((box, number) => ({ ...this.look(box), needs: [...needs[number]] })));
    this.highlight(this.instructions.hits);
    if (this.toggled) {
      // An opened entry has no box: select its first member.
      const inside = this.outline.entries[this.outline.entries.indexOf(this.toggled) + 1];
      this.point(this.ofEntry.has(this.toggled) ? this.toggled : inside);
      this.toggled = null;
    }
  }

  look({ entry, value, what }) {
    const { method } = this;
    if (!entry) return { label: method.valueName(value) ?? `${what} %${value}`, tone: "edge", round: true };
    if (entry.kind === "group") return { label: `▸ ${entry.name}`, tone: "module" };
    const tone = method.isDelegate(entry.index) ? `p${method.data.instructions.target[entry.index] % 8}` : "kernel";
    if (entry.kind === "part") return { label: partTexts(entry.text)[0], tone };
    return { label: `${entry.parts ? "▸ " : ""}${method.label(entry.index)}`, tone };
  }

  describe({ entry, value, what }) {
    const { method } = this;
    if (!entry) return [`${what} ${method.long(value)}`];
    if (entry.kind === "group") return [entry.name, plural(entry.count, "instruction")];
    const spent = method.spent(entry);
    const time = spent === null ? "" : microseconds(spent);
    if (entry.kind === "part") return [...partTexts(entry.text), `in ${entry.index} ${method.label(entry.index)}`, time].filter(Boolean);
    const module = method.module(entry.index) ?? [];
    return [`${entry.index}  ${method.label(entry.index)}`, method.summary(entry.index), module.join("."), method.source(entry.index), time].filter(Boolean);
  }

  toggle(entry, open) {
    if (!entry || !this.outline.holds(entry)) return;
    this.toggled = entry;
    this.instructions.set(entry, open);
  }

  /** Select the box of an entry. */
  point(entry) {
    const at = this.ofEntry.get(entry);
    if (at !== undefined) this.view.choose(at, false);
  }

  /** Fade all boxes except those of `entries`; without `entries` show all. */
  highlight(entries) {
    const boxes = entries?.map((entry) => this.ofEntry.get(entry)).filter((box) => box !== undefined);
    this.view.highlight(boxes ? new Set(boxes) : null);
  }
}
