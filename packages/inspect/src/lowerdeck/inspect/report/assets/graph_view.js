// Zoomable picture of a graph: boxes in rows below their inputs.

const BOX = { width: 150, height: 26, columnGap: 168, rowGap: 52 };
const READABLE = 0.6;
const OUTLINES = { left: "left-out", edge: "muted", kernel: "accent", module: "muted" };

/**
 * Nodes are {label, needs, tone, round}; `needs` are indices of earlier nodes, `tone` is p0 to p7, "left" (dashed),
 * "edge", "kernel" or "module". `describe(index)` returns lines about a node. Callbacks with the index of a node:
 * `picked` on selection, `opened` to open it (Enter, double click), `closed` to close the group that contains it.
 */
class GraphView {
  constructor({ describe, picked, opened = null, closed = null, hint = "", tools = [] }) {
    Object.assign(this, { describe, picked, opened, closed, nodes: [], readers: [] });
    this.status = h("p", { class: "picked", role: "status" }, `Drag to move, turn the wheel with Ctrl to zoom; arrow keys walk along the edges.${hint}`);
    const { canvas, redraw } = sharpCanvas(
      560,
      {
        class: "graph",
        tabindex: "0",
        role: "application",
        onmousemove: oncePerFrame((event) => this.hover(event)),
        onmouseleave: () => tooltip.hide(),
        onpointerdown: (event) => this.press(event),
        onwheel: (event) => this.wheel(event),
        onkeydown: (event) => this.key(event),
        ondblclick: (event) => this.at(event) >= 0 && this.opened?.(this.at(event)),
      },
      (context, width, height) => this.draw(context, width, height),
    );
    this.canvas = canvas;
    this.redraw = redraw;
    const button = (title, text, action) => h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    const zoom = h(
      "span",
      { class: "zoom" },
      ...tools,
      button("Zoom in", "+", () => this.zoom(1.5)),
      button("Zoom out", "−", () => this.zoom(1 / 1.5)),
      button("Show all", "all", () => this.fit(true)),
    );
    this.element = h("figure", {}, h("figcaption", {}, h("span", {}, "inputs above, results below"), zoom), canvas, this.status);
  }

  /** Show other nodes; reset scale and selection. */
  show(nodes) {
    const places = layoutOf(nodes.map((node) => node.needs));
    this.nodes = nodes.map((node, index) => ({ ...node, ...places[index] }));
    this.readers = nodes.map(() => []);
    nodes.forEach((node, index) => node.needs.forEach((other) => this.readers[other].push(index)));
    this.columns = this.nodes.reduce((most, node) => Math.max(most, node.x), 0) + 1;
    this.rows = this.nodes.reduce((most, node) => Math.max(most, node.y), 0) + 1;
    Object.assign(this, { selected: -1, matches: null, scale: undefined });
    const label = `Graph of ${plural(nodes.length, "node")}. Arrow up and down walk along edges, left and right along a row, plus and minus zoom, 0 shows all.`;
    this.canvas.setAttribute("aria-label", label);
    this.redraw();
  }

  x(node) {
    return (this.strip(node) * this.columns + node.x) * BOX.columnGap + BOX.columnGap / 2;
  }

  y(node) {
    return (node.y % this.stripRows) * BOX.rowGap + BOX.rowGap / 2;
  }

  strip(node) {
    return Math.floor(node.y / this.stripRows);
  }

  /** Split a narrow graph into strips side by side if all of it is then readable; return the scale. */
  fold(width, height) {
    const scaleOf = (strips) => Math.min(width / (strips * this.columns * BOX.columnGap), height / (Math.ceil(this.rows / strips) * BOX.rowGap), 1);
    let best = 1;
    for (let strips = 2; strips <= this.rows && strips * this.columns * BOX.columnGap * READABLE <= width; strips += 1) {
      if (scaleOf(strips) > scaleOf(best)) best = strips;
    }
    const strips = scaleOf(best) >= READABLE ? best : 1;
    this.stripRows = Math.ceil(this.rows / strips);
    this.wide = strips * this.columns * BOX.columnGap;
    this.tall = this.stripRows * BOX.rowGap;
    return scaleOf(strips);
  }

  /** Show the whole graph, or the beginning of a large one at a readable scale unless `whole`. */
  fit(whole) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = this.fold(width, height);
    this.scale = whole || scale >= READABLE ? scale : 0.85;
    const first = this.nodes[0];
    this.left = this.scale === scale ? (this.wide * scale - width) / 2 / scale : (first ? this.x(first) : 0) - width / 2 / this.scale;
    this.top = this.scale === scale ? (this.tall * scale - height) / 2 / scale : 0;
    this.redraw();
  }

  draw(context, width, height) {
    if (this.scale === undefined) this.fit(false);
    context.scale(this.scale, this.scale);
    context.translate(-this.left, -this.top);
    const seen = { left: this.left - BOX.columnGap, right: this.left + width / this.scale + BOX.columnGap, top: this.top - BOX.rowGap, bottom: this.top + height / this.scale + BOX.rowGap };
    this.drawEdges(context, seen);
    const shades = new Map();
    const shade = (name) => shades.get(name) ?? shades.set(name, color(name)).get(name);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.nodes.forEach((node, index) => {
      const x = this.x(node);
      const y = this.y(node);
      if (x < seen.left || x > seen.right || y < seen.top || y > seen.bottom) return;
      context.globalAlpha = this.matches && !this.matches.has(index) ? 0.2 : 1;
      this.drawNode(context, node, x, y, shade);
      if (index === this.selected) {
        context.strokeStyle = shade("text");
        context.lineWidth = 3;
        context.strokeRect(x - BOX.width / 2 - 3, y - BOX.height / 2 - 3, BOX.width + 6, BOX.height + 6);
      }
    });
    context.globalAlpha = 1;
  }

  drawNode(context, node, x, y, shade) {
    const full = /^p\d$/.test(node.tone);
    context.beginPath();
    context.roundRect(x - BOX.width / 2, y - BOX.height / 2, BOX.width, BOX.height, node.round ? BOX.height / 2 : 4);
    context.fillStyle = shade(full ? node.tone : node.tone === "module" ? "line" : "surface");
    context.fill();
    if (!full) {
      context.setLineDash(node.tone === "left" ? [4, 3] : []);
      context.strokeStyle = shade(OUTLINES[node.tone]);
      context.lineWidth = 1.5;
      context.stroke();
      context.setLineDash([]);
    }
    if (this.scale < 0.35) return;
    context.fillStyle = full ? "#fff" : shade("text");
    const label = node.label.replace(/^aten::/, "");
    context.fillText(label.length > 23 ? `${label.slice(0, 22)}…` : label, x, y + 0.5);
  }

  drawEdges(context, seen) {
    context.strokeStyle = color("edge");
    context.lineWidth = Math.max(1, 0.7 / this.scale);
    context.beginPath();
    const chosen = [];
    this.nodes.forEach((node, index) => {
      const y = this.y(node) - BOX.height / 2;
      for (const other of node.needs) {
        const from = this.nodes[other];
        const start = this.y(from) + BOX.height / 2;
        // An edge to the next strip leads upwards.
        if (Math.max(start, y) < seen.top || Math.min(start, y) > seen.bottom) continue;
        if (index === this.selected || other === this.selected) chosen.push([from, start, node, y]);
        else this.edge(context, from, start, node, y);
      }
    });
    context.stroke();
    context.strokeStyle = color("accent");
    context.lineWidth = Math.max(2, 1.5 / this.scale);
    context.beginPath();
    chosen.forEach((edge) => this.edge(context, ...edge));
    context.stroke();
  }

  /** Draw an edge: a curve to the next row; a longer edge runs between two columns. */
  edge(context, from, start, to, end) {
    const gap = BOX.rowGap - BOX.height;
    const across = this.x(to) - this.x(from);
    context.moveTo(this.x(from), start);
    const leaves = this.strip(from) !== this.strip(to);
    if (to.y - from.y > 1 || leaves) {
      const beside = this.x(from) + (BOX.columnGap / 2) * (across < 0 ? -1 : 1);
      const lane = leaves ? (this.strip(from) + 1) * this.columns * BOX.columnGap : beside;
      context.bezierCurveTo(this.x(from), start + gap / 2, lane, start + gap / 2, lane, start + gap);
      context.lineTo(lane, end - gap);
      context.bezierCurveTo(lane, end - gap / 2, this.x(to), end - gap / 2, this.x(to), end);
    } else {
      const middle = (start + end) / 2;
      context.bezierCurveTo(this.x(from), middle, this.x(to), middle, this.x(to), end);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left) / this.scale + this.left;
    const y = (event.clientY - box.top) / this.scale + this.top;
    return this.nodes.findIndex((node) => Math.abs(this.x(node) - x) <= BOX.width / 2 && Math.abs(this.y(node) - y) <= BOX.height / 2);
  }

  hover(event) {
    if (event.buttons) return tooltip.hide();
    const index = this.at(event);
    return index < 0 ? tooltip.hide() : tooltip.show(event.clientX, event.clientY, this.describe(index));
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.focus();
    const start = { x: event.clientX, y: event.clientY, left: this.left, top: this.top };
    tooltip.hide();
    const move = (next) => {
      this.left = start.left - (next.clientX - start.x) / this.scale;
      this.top = start.top - (next.clientY - start.y) / this.scale;
      this.redraw();
    };
    const release = (last) => {
      this.canvas.removeEventListener("pointermove", move);
      this.canvas.removeEventListener("pointerup", release);
      if (Math.hypot(last.clientX - start.x, last.clientY - start.y) < 4 && this.at(last) >= 0) this.choose(this.at(last));
    };
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", release);
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const next = Math.min(2.5, Math.max(0.005, this.scale * factor));
    this.left += x / this.scale - x / next;
    this.top += y / this.scale - y / next;
    this.scale = next;
    this.redraw();
  }

  wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    this.zoom(1.2 ** (-event.deltaY / 60), event.clientX - box.left, event.clientY - box.top);
  }

  choose(index, tell = true) {
    this.selected = index;
    this.status.replaceChildren(...this.describe(index).flatMap((line) => [named(line), " · "]).slice(0, -1));
    this.reveal(index);
    this.redraw();
    if (tell) this.picked(index);
  }

  /** Scroll to a box unless it is visible. */
  reveal(index) {
    const node = this.nodes[index];
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const x = (this.x(node) - this.left) * this.scale;
    const y = (this.y(node) - this.top) * this.scale;
    if (x < 40 || x > width - 40 || y < 10 || y > height - 10) {
      this.scale = Math.max(this.scale, 0.85);
      this.left = this.x(node) - width / 2 / this.scale;
      // Centred, but not beyond the first and the last row.
      const end = this.tall - height / this.scale;
      this.top = Math.max(0, Math.min(end, this.y(node) - height / 2 / this.scale));
    }
  }

  highlight(indices) {
    this.matches = indices;
    if (indices) {
      const all = `${count(this.nodes.length)} boxes`;
      this.status.textContent = indices.size ? `${count(indices.size)} of ${all}` : `no hits in ${all}`;
      if (indices.size) this.reveal(indices.values().next().value);
    }
    this.redraw();
  }

  neighbour(key) {
    if (this.selected < 0) return 0;
    if (key === "ArrowUp") return this.nodes[this.selected].needs[0] ?? this.selected;
    if (key === "ArrowDown") return this.readers[this.selected][0] ?? this.selected;
    const here = this.nodes[this.selected];
    const way = key === "ArrowRight" ? 1 : -1;
    let best = this.selected;
    this.nodes.forEach((node, index) => {
      if (node.y !== here.y || (node.x - here.x) * way <= 0) return;
      if (best === this.selected || (node.x - this.nodes[best].x) * way < 0) best = index;
    });
    return best;
  }

  key(event) {
    if (event.key.startsWith("Arrow") && this.nodes.length) this.choose(this.neighbour(event.key));
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit(true);
    else if (event.key === "Enter" && this.opened && this.selected >= 0) this.opened(this.selected);
    else if (event.key === "Backspace" && this.closed && this.selected >= 0) this.closed(this.selected);
    else return;
    event.preventDefault();
  }
}
