// Outline of a method's instructions, and details of the selected one.

class InstructionsView {
  constructor(method, picked, toggled = () => {}) {
    Object.assign(this, { method, picked, toggled, query: "", hits: null });
    this.outline = new Outline(method);
    this.detail = h("div", { class: "detail", role: "region", "aria-label": "Chosen instruction", "aria-live": "polite" });
    this.counter = h("p", { class: "counter", role: "status" });
    const columns = [method.hasSources ? "with-sources" : null, method.times ? "with-times" : null];
    this.list = new VirtualList({
      label: `Instructions of method ${method.name}`,
      className: ["instructions", ...columns].filter(Boolean).join(" "),
      render: (entry) => this.row(entry),
      picked: (entry) => this.pick(entry),
      opened: (entry) => this.toggle(entry),
      numbers: method.length,
    });
    this.list.element.addEventListener("keydown", (event) => this.key(event));
    this.element = section(
      "instructions",
      "Instructions",
      [method.hasSources ? "" : "This file carries no stack traces, so instructions are shown without source lines.", method.guessesModules ? MODULES_GUESSED : ""].join(" ").trim() || null,
      h("div", { class: "tools" }, this.counter, h("span", { class: "zoom" }, this.tools())),
      h("div", { class: "split" }, this.list.element, this.detail),
    );
    this.filter("");
    this.detail.append(h("p", { class: "none" }, "Choose an instruction to see its values and where it comes from."));
  }

  /** Buttons that open and close all groups, if there are any. */
  tools() {
    const button = (text, open) => h("button", { type: "button", onclick: () => this.toggleAll(open) }, text);
    return this.outline.hasHolders ? [button("open all", true), button("close all", false)] : [];
  }

  row(entry) {
    const { method } = this;
    const step = entry.kind === "step";
    const [operator, about] = step ? [method.label(entry.index), method.summary(entry.index)] : entry.kind === "part" ? partTexts(entry.text) : [entry.name, plural(entry.count, "instruction")];
    const style = { paddingLeft: `${Math.min(entry.depth, MOST_LEVELS) * 0.9}rem` };
    const twist = this.outline.holds(entry) ? h("span", { class: "twist", "aria-hidden": "true", onclick: () => this.toggle(entry) }, this.isClosed(entry) ? "▸ " : "▾ ") : null;
    const kind = entry.kind === "group" ? "op group" : step && method.isDelegate(entry.index) ? "op delegate" : "op";
    const spent = method.times ? method.spent(entry) : null;
    return [
      h("span", { class: "index" }, step ? count(entry.index) : ""),
      h("span", { class: kind, style }, twist, named(operator)),
      named(about, { class: "args" }),
      method.hasSources ? named(step ? method.source(entry.index) : "", { class: "source" }) : null,
      method.times ? h("span", { class: "size" }, spent === null ? "" : microseconds(spent)) : null,
    ];
  }

  isClosed(entry) {
    return !this.query && this.outline.closed.has(entry);
  }

  toggle(entry, open) {
    if (!this.query) this.set(entry, open);
  }

  /** Open or close an entry; search results stay unchanged. */
  set(entry, open) {
    this.outline.toggle(entry, open);
    this.list.show(this.query ? this.list.items : this.outline.visible());
    this.toggled();
  }

  toggleAll(open) {
    this.outline.toggleAll(open);
    this.list.show(this.query ? this.list.items : this.outline.visible());
    this.toggled();
  }

  /** Arrow right opens a group; arrow left closes it, or selects the parent of an entry. */
  key(event) {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    const { items, selected } = this.list;
    const entry = items[selected];
    if (!entry) return;
    const open = event.key === "ArrowRight";
    if (this.outline.holds(entry) && this.isClosed(entry) === open) this.toggle(entry, open);
    else if (open) this.list.select(selected + (this.outline.holds(entry) ? 1 : 0));
    else {
      const above = items.slice(0, selected).findLastIndex((one) => one.depth < entry.depth);
      if (above >= 0) this.list.select(above);
    }
  }

  pick(entry, tell = true) {
    const { method } = this;
    const { index } = entry;
    if (entry.kind === "group") {
      this.detail.replaceChildren(h("h3", {}, named(entry.name)), h("p", {}, `module of ${plural(entry.count, "instruction")}`));
      return;
    }
    if (entry.kind === "part") {
      const [operator, about] = partTexts(entry.text);
      this.detail.replaceChildren(h("h3", {}, named(operator)), h("p", {}, `in ${count(index)} `, named(method.label(index))), h("p", {}, named(about, { class: "args" })));
      if (tell) this.picked(index, entry);
      return;
    }
    const { made, read } = method.split(index);
    const frames = method.stack(index);
    const module = method.module(index);
    const list = (title, values) =>
      values.length
        ? [h("h4", {}, title), h("ul", { class: "values" }, values.slice(0, 200).map((value) => this.value(value)))]
        : [];
    this.detail.replaceChildren(
      h("h3", {}, `${count(index)} `, named(method.label(index))),
      ...(module?.length ? [h("p", {}, "of ", named(module.join("."), { class: "op" }))] : []),
      ...list("makes", made),
      ...list("reads", read),
      ...(frames.length
        ? [h("h4", {}, "from"), h("ol", { class: "frames" }, [...frames].reverse().map((frame) => this.frame(frame)))]
        : []),
    );
    if (tell) this.picked(index, entry);
  }

  value(value) {
    const { method } = this;
    const role = method.role(value);
    const size = method.nbytes(value) ? ` · ${bytes(method.nbytes(value))}` : "";
    const note = method.note(value);
    return h(
      "li",
      {},
      h("code", {}, `%${value}`),
      " ",
      named(method.text(value)),
      h("small", {}, `${ROLES[role]}${size}${note ? ` · ${note}` : ""}`),
      method.valueName(value) ? named(method.valueName(value), { class: "name" }) : null,
    );
  }

  frame([file, line, name, context]) {
    return h("li", {}, named(`${file}:${line}`, { class: "file" }), name ? named(` in ${name}`) : null, context ? h("code", {}, context) : null);
  }

  /** Select an entry; clear the search if it hides the entry. */
  choose(entry) {
    if (!this.list.point(entry)) {
      this.filter("");
      this.list.point(entry);
    }
    this.pick(entry);
  }

  /** Select an instruction from elsewhere on the page; clear the search if it hides the instruction. */
  open(index, focus = true) {
    const entry = this.outline.steps.get(index);
    if (!this.list.point(entry)) {
      this.outline.uncover(entry);
      this.filter("");
      this.list.point(entry);
    }
    this.pick(entry);
    this.element.scrollIntoView({ block: "nearest" });
    if (focus) this.list.element.focus({ preventScroll: true });
  }

  /** Show the entries that contain all words of a query; return the instructions among them. */
  filter(query) {
    const words = wordsOf(query);
    this.query = words.join(" ");
    const all = plural(this.method.length, "instruction");
    if (!words.length) {
      this.list.show(this.outline.visible());
      this.hits = null;
      this.counter.textContent = all;
      return Array.from({ length: this.method.length }, (_, index) => index);
    }
    const { shown, hits, steps } = this.outline.found(words);
    this.list.show(shown);
    this.hits = hits;
    const parts = shown.filter((entry) => entry.kind === "part").length;
    const inside = parts ? `, ${plural(parts, "operator")} inside delegates` : "";
    this.counter.textContent = shown.length ? `${count(steps.length)} of ${all}${inside}` : `no hits in ${all}`;
    return steps;
  }
}

/** Name of an operator in a delegate, and its results and arguments as text. */
function partTexts(text) {
  const [, operator, taken, made] = /^([^(]*)\((.*)\) -> (.*)$/.exec(text) ?? [null, text, "", ""];
  return [operator, made ? `${made} ← (${taken})` : ""];
}
