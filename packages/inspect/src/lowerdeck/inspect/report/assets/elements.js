// HTML elements. Names from files are inserted as text nodes and attributes, never as markup.

/** Create an element. Properties `on…` are listeners, `style` is an object, others are attributes. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Text from a file in a `bdi` element, so that right-to-left marks cannot reorder the page. */
function named(text, properties = {}) {
  return h("bdi", properties, text);
}

function section(id, title, about, ...children) {
  return h(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title),
    about ? h("p", { class: "about" }, about) : null,
    ...children,
  );
}

function tiles(pairs) {
  return h(
    "dl",
    { class: "tiles" },
    pairs.map(([label, value, note]) =>
      h("div", {}, h("dt", {}, label), h("dd", {}, value, note ? h("small", {}, note) : null)),
    ),
  );
}

/** The tooltip of the page; it follows the pointer. */
const tooltip = {
  element: null,
  show(x, y, lines) {
    if (!this.element) {
      this.element = h("div", { class: "tooltip", role: "tooltip", id: "tooltip" });
      document.body.append(this.element);
    }
    this.element.replaceChildren(
      ...lines.map((line, number) => h(number ? "span" : "strong", {}, named(line))),
    );
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = Math.min(x + 14, document.documentElement.clientWidth - width - 8);
    const top = y + 18 + height > innerHeight ? y - height - 10 : y + 18;
    this.element.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
};

/** Return a function that calls `work` at most once per frame, with the last arguments. */
function oncePerFrame(work) {
  let pending = null;
  return (...args) => {
    if (pending === null) {
      requestAnimationFrame(() => {
        const latest = pending;
        pending = null;
        work(...latest);
      });
    }
    pending = args;
  };
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A canvas at device resolution that redraws when its width or the theme changes. */
function sharpCanvas(height, properties, draw) {
  const canvas = h("canvas", { height, ...properties });
  canvas.style.height = `${height}px`;
  const redraw = oncePerFrame(() => {
    const width = canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
  });
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return { canvas, redraw };
}
