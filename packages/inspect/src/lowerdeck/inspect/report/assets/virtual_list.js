// List that renders only its visible rows.

class VirtualList {
  /** `render(item)` returns the children of a row; `picked(item)` is called on selection; `numbers` is the largest index. */
  constructor({ label, className = "", rowHeight = 26, render, picked, opened, numbers = 0 }) {
    Object.assign(this, { rowHeight, render, picked, opened });
    this.items = [];
    this.selected = -1;
    this.id = `list-${(VirtualList.made = (VirtualList.made ?? 0) + 1)}`;
    this.body = h("div", { class: "rows", role: "presentation" });
    this.element = h(
      "div",
      {
        class: `virtual-list ${className}`,
        role: "listbox",
        tabindex: "0",
        "aria-label": label,
        onscroll: oncePerFrame(() => this.draw()),
        onkeydown: (event) => this.key(event),
        onclick: (event) => this.click(event),
        ondblclick: () => this.open(),
      },
      this.body,
    );
    this.element.style.setProperty("--index", `${Math.max(3, count(numbers).length)}ch`);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  show(items) {
    const kept = this.items[this.selected];
    this.items = items;
    this.selected = items.indexOf(kept);
    this.body.style.height = `${items.length * this.rowHeight}px`;
    this.element.style.setProperty("--rows", `${Math.max(2, items.length) * this.rowHeight + 2}px`);
    if (this.selected < 0) this.element.scrollTop = 0;
    else this.reveal();
    this.draw();
  }

  draw() {
    const height = this.element.clientHeight;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - 4);
    const last = Math.min(this.items.length, first + Math.ceil(height / this.rowHeight) + 8);
    const rows = [];
    for (let index = first; index < last; index += 1) rows.push(this.row(index));
    this.body.replaceChildren(...rows);
    if (this.selected >= first && this.selected < last) {
      this.element.setAttribute("aria-activedescendant", `${this.id}-${this.selected}`);
    } else {
      this.element.removeAttribute("aria-activedescendant");
    }
  }

  row(index) {
    return h(
      "div",
      {
        class: "row",
        role: "option",
        id: `${this.id}-${index}`,
        "data-index": index,
        "aria-selected": String(index === this.selected),
        "aria-posinset": index + 1,
        "aria-setsize": this.items.length,
        style: { transform: `translateY(${index * this.rowHeight}px)`, height: `${this.rowHeight}px` },
      },
      this.render(this.items[index]),
    );
  }

  click(event) {
    const row = event.target.closest("[data-index]");
    if (row) this.select(Number(row.dataset.index));
  }

  select(index, tell = true) {
    if (!this.items.length) return;
    this.selected = Math.max(0, Math.min(this.items.length - 1, index));
    this.reveal();
    this.draw();
    if (tell) this.picked?.(this.items[this.selected]);
  }

  /** Select an item without calling `picked`; return whether the list shows it. */
  point(item) {
    const index = this.items.indexOf(item);
    if (index >= 0) this.select(index, false);
    return index >= 0;
  }

  open() {
    if (this.selected >= 0) this.opened?.(this.items[this.selected]);
  }

  reveal() {
    const top = this.selected * this.rowHeight;
    const view = this.element;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + this.rowHeight > view.scrollTop + view.clientHeight) {
      view.scrollTop = top + this.rowHeight - view.clientHeight;
    }
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.rowHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    if (event.key in steps) this.select(this.selected + steps[event.key]);
    else if (event.key === "Home") this.select(0);
    else if (event.key === "End") this.select(this.items.length - 1);
    else if (event.key === "Enter") this.open();
    else return;
    event.preventDefault();
  }
}
