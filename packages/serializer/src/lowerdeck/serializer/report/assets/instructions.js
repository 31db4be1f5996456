// The instructions of a method: a list, and all about the chosen one beside it.

class InstructionsView {
  constructor(method, picked) {
    this.method = method;
    this.picked = picked;
    this.all = Array.from({ length: method.length }, (_, index) => index);
    this.detail = h("div", { class: "detail", role: "region", "aria-label": "Chosen instruction", "aria-live": "polite" });
    this.counter = h("p", { class: "counter", role: "status" });
    this.list = new VirtualList({
      label: `Instructions of method ${method.name}`,
      className: method.hasSources ? "instructions with-sources" : "instructions",
      render: (index) => this.row(index),
      picked: (index) => this.pick(index),
      numbers: method.length,
    });
    this.element = section(
      "instructions",
      "Instructions",
      method.hasSources ? null : "This file carries no stack traces, so instructions are shown without source lines.",
      this.counter,
      h("div", { class: "split" }, this.list.element, this.detail),
    );
    this.filter("");
    this.detail.append(h("p", { class: "none" }, "Choose an instruction to see its values and where it comes from."));
  }

  row(index) {
    const { method } = this;
    return [
      h("span", { class: "index" }, count(index)),
      named(method.label(index), { class: method.isDelegate(index) ? "op delegate" : "op" }),
      named(method.summary(index), { class: "args" }),
      method.hasSources ? named(method.source(index), { class: "source" }) : null,
    ];
  }

  pick(index, tell = true) {
    const { method } = this;
    const { made, read } = method.split(index);
    const frames = method.stack(index);
    const list = (title, values) =>
      values.length
        ? [h("h4", {}, title), h("ul", { class: "values" }, values.slice(0, 200).map((value) => this.value(value)))]
        : [];
    this.detail.replaceChildren(
      h("h3", {}, `${count(index)} `, named(method.label(index))),
      ...list("makes", made),
      ...list("reads", read),
      ...(frames.length
        ? [h("h4", {}, "from"), h("ol", { class: "frames" }, [...frames].reverse().map((frame) => this.frame(frame)))]
        : []),
    );
    if (tell) this.picked(index);
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

  /** Choose an instruction from elsewhere on the page; gives up the search if it hides it. */
  open(index, focus = true) {
    if (!this.list.point(index)) {
      this.filter("");
      this.list.point(index);
    }
    this.pick(index);
    this.element.scrollIntoView({ block: "nearest" });
    if (focus) this.list.element.focus({ preventScroll: true });
  }

  filter(query) {
    const words = wordsOf(query);
    const kept = words.length
      ? this.all.filter((index) => words.every((word) => this.method.haystack(index).includes(word)))
      : this.all;
    this.list.show(kept);
    this.counter.textContent =
      words.length ? `${count(kept.length)} of ${plural(this.all.length, "instruction")}` : plural(this.all.length, "instruction");
    return kept;
  }
}
