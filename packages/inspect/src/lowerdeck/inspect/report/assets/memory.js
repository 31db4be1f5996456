// Planned memory over time: each tensor is a rectangle, with bytes upwards and instructions to the right.

const MEMORY_COLORS = { i: "input", o: "output", b: "output", s: "state" };
const MEMORY_LEGEND = [
  ["input", "input"],
  ["output", "output"],
  ["state", "state, kept between runs"],
  ["intermediate", "intermediate"],
];

class MemoryView {
  constructor(method, arena, opened, height = 380) {
    Object.assign(this, { method, arena, opened, selected: null, cursor: null, matches: null });
    this.blocks = arena.blocks.map(([value, offset, nbytes, born, dies]) => ({ value, offset, nbytes, born, dies }));
    this.blocks.sort((a, b) => a.born - b.born || a.offset - b.offset);
    this.top = Math.max(arena.size, 1, ...this.blocks.slice(0, 1).map((b) => b.offset + b.nbytes));
    for (const block of this.blocks) this.top = Math.max(this.top, block.offset + block.nbytes);
    this.reset(false);
    this.measure();
    this.status = h("p", { class: "picked", role: "status" }, this.hint());
    const { canvas, redraw } = sharpCanvas(
      height,
      {
        class: "memory",
        tabindex: "0",
        role: "application",
        "aria-label": `Planned memory ${arena.id} of method ${method.name}: ${this.summary()}. Arrow keys walk through the values, Enter shows the instruction, plus and minus zoom, 0 shows all.`,
        onmousemove: oncePerFrame((event) => this.hover(event)),
        onmouseleave: () => tooltip.hide(),
        onmousedown: (event) => this.press(event),
        onkeydown: (event) => this.key(event),
        ondblclick: () => this.reset(),
        onblur: () => tooltip.hide(),
      },
      (context, width, tall) => this.draw(context, width, tall),
    );
    this.canvas = canvas;
    this.redraw = redraw;
    const button = (title, text, action) => h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    this.element = h(
      "figure",
      { class: "memory-figure" },
      h(
        "figcaption",
        {},
        h("span", {}, this.summary()),
        h(
          "span",
          { class: "zoom" },
          button("Zoom in on time", "+", () => this.zoom(0.5)),
          button("Zoom out", "−", () => this.zoom(2)),
          button("Show all", "all", () => this.reset()),
        ),
      ),
      canvas,
      this.legend(),
      this.status,
    );
  }

  hint() {
    return "Drag a frame to zoom in, double-click to see all. Hover, or use the arrow keys, to read a value.";
  }

  summary() {
    const where = this.arena.device === "CPU" ? "" : ` on ${this.arena.device}`;
    const busiest = `${bytes(this.peak)} live at most, at instruction ${count(this.peakTime)}`;
    return `memory ${this.arena.id}${where}: ${bytes(this.arena.size)} planned for ${plural(this.blocks.length, "value")}, ${busiest}`;
  }

  legend() {
    const present = new Set(this.blocks.map((block) => this.colorName(block)));
    return h(
      "ul",
      { class: "legend" },
      MEMORY_LEGEND.filter(([name]) => present.has(name)).map(([name, text]) =>
        h("li", {}, h("i", { class: `swatch ${name}` }), text),
      ),
    );
  }

  colorName(block) {
    return MEMORY_COLORS[this.method.role(block.value)] ?? "intermediate";
  }

  /** Compute the bytes in use at each instruction; shared bytes count once. */
  measure() {
    const union = new CoveredLength(this.blocks.map(({ offset, nbytes }) => [offset, offset + nbytes]));
    const changes = Array.from({ length: this.method.length + 2 }, () => null);
    const change = (time, block, by) => (changes[time] ??= []).push([block, by]);
    for (const block of this.blocks) {
      change(block.born, block, 1);
      change(block.dies + 1, block, -1);
    }
    this.live = new Float64Array(changes.length);
    changes.forEach((list, time) => {
      list?.forEach(([{ offset, nbytes }, by]) => union.add(offset, offset + nbytes, by));
      this.live[time] = union.length;
    });
    this.peakTime = this.live.reduce((best, value, time) => (value > this.live[best] ? time : best), 0);
    this.peak = this.live[this.peakTime];
  }

  reset(draw = true) {
    this.view = { from: 0, to: Math.max(1, this.method.length), low: 0, high: this.top };
    if (draw) this.redraw();
  }

  /** Layout of the canvas: the rectangles above, the curve of bytes in use below. */
  area(width = this.canvas.clientWidth, height = this.canvas.clientHeight) {
    const left = 74;
    const curve = 64;
    return { left, top: 8, width: width - left - 8, height: height - curve - 38, curveTop: height - curve - 20, curve };
  }

  x(time, area) {
    return area.left + ((time - this.view.from) / (this.view.to - this.view.from)) * area.width;
  }

  y(offset, area) {
    return area.top + area.height - ((offset - this.view.low) / (this.view.high - this.view.low)) * area.height;
  }

  place(block, area) {
    const x = this.x(block.born, area);
    const y = this.y(block.offset + block.nbytes, area);
    return { x, y, width: this.x(block.dies + 1, area) - x, height: this.y(block.offset, area) - y };
  }

  draw(context, width, height) {
    const area = this.area(width, height);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    this.drawAxes(context, area, height);
    context.save();
    context.beginPath();
    context.rect(area.left, area.top, area.width, area.height);
    context.clip();
    const shades = Object.fromEntries(MEMORY_LEGEND.map(([name]) => [name, color(name)]));
    for (const block of this.blocks) {
      if (block.dies + 1 < this.view.from || block.born > this.view.to) continue;
      const { x, y, width: wide, height: tall } = this.place(block, area);
      context.globalAlpha = this.matches && !this.matches.has(block.value) ? 0.18 : 1;
      context.fillStyle = shades[this.colorName(block)];
      // A gap separates neighbours if there is room.
      const gap = wide > 4 && tall > 4 ? 1 : 0;
      context.fillRect(x, y, Math.max(wide - gap, 1), Math.max(tall - gap, 1));
    }
    context.globalAlpha = 1;
    this.drawMarks(context, area);
    context.restore();
    this.drawCurve(context, area);
  }

  drawAxes(context, area, height) {
    context.fillStyle = color("muted");
    context.strokeStyle = color("line");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const mark of ticks(this.view.low, this.view.high, 6)) {
      const y = Math.round(this.y(mark, area)) + 0.5;
      context.beginPath();
      context.moveTo(area.left, y);
      context.lineTo(area.left + area.width, y);
      context.stroke();
      context.fillText(bytes(mark), area.left - 6, y);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    const free = area.left + area.width - context.measureText("instruction").width - 8;
    for (const mark of ticks(this.view.from, this.view.to, Math.max(2, area.width / 60))) {
      const x = this.x(mark, area);
      if (x + context.measureText(count(mark)).width / 2 < free) context.fillText(count(mark), x, height - 4);
    }
    context.textAlign = "right";
    context.fillText("instruction", area.left + area.width, height - 4);
    context.fillText("live bytes", area.left - 6, area.curveTop + 10);
    context.fillText(bytes(this.peak), area.left - 6, area.curveTop + 24);
  }

  drawMarks(context, area) {
    context.strokeStyle = color("text");
    if (this.cursor !== null) {
      context.fillStyle = color("cursor");
      const x = this.x(this.cursor, area);
      context.fillRect(x, area.top, Math.max(1.5, this.x(this.cursor + 1, area) - x), area.height);
    }
    if (this.selected) {
      const { x, y, width, height } = this.place(this.selected, area);
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, Math.max(width, 2) + 2, Math.max(height, 2) + 2);
    }
    if (this.frame) {
      const [x0, y0, x1, y1] = this.frame;
      context.lineWidth = 1;
      context.setLineDash([4, 3]);
      context.strokeRect(x0, y0, x1 - x0, y1 - y0);
      context.setLineDash([]);
    }
  }

  drawCurve(context, area) {
    const base = area.curveTop + area.curve;
    const from = Math.max(0, Math.floor(this.view.from));
    const to = Math.min(this.method.length, Math.ceil(this.view.to));
    context.beginPath();
    context.moveTo(area.left, base);
    const stride = Math.max(1, Math.floor((to - from) / (2 * area.width)));
    for (let time = from; time < to; time += stride) {
      let most = 0;
      for (let at = time; at < Math.min(to, time + stride); at += 1) most = Math.max(most, this.live[at]);
      const y = base - (most / (this.peak || 1)) * (area.curve - 6);
      context.lineTo(Math.max(area.left, this.x(time, area)), y);
      context.lineTo(Math.min(area.left + area.width, this.x(time + stride, area)), y);
    }
    context.lineTo(Math.min(area.left + area.width, this.x(to, area)), base);
    context.closePath();
    context.fillStyle = color("curve");
    context.fill();
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  time(x, area = this.area()) {
    return this.view.from + ((x - area.left) / area.width) * (this.view.to - this.view.from);
  }

  offset(y, area = this.area()) {
    return this.view.low + ((area.top + area.height - y) / area.height) * (this.view.high - this.view.low);
  }

  /** The smallest rectangle at the pointer, within a pixel or two. */
  at(x, y) {
    const area = this.area();
    let best = null;
    for (const block of this.blocks) {
      const place = this.place(block, area);
      if (x < place.x - 1 || x > place.x + Math.max(place.width, 2) || y < place.y - 1 || y > place.y + Math.max(place.height, 2)) continue;
      if (!best || block.nbytes * (block.dies - block.born + 1) < best.nbytes * (best.dies - best.born + 1)) best = block;
    }
    return best;
  }

  hover(event) {
    if (this.frame) return;
    const [x, y] = this.point(event);
    const area = this.area();
    const block = y < area.top + area.height ? this.at(x, y) : null;
    if (block) tooltip.show(event.clientX, event.clientY, this.describe(block));
    else if (y >= area.curveTop && x >= area.left) {
      const time = Math.min(this.method.length - 1, Math.max(0, Math.floor(this.time(x, area))));
      tooltip.show(event.clientX, event.clientY, [`${bytes(this.live[time] ?? 0)} live`, `at instruction ${count(time)}`]);
    } else tooltip.hide();
  }

  describe(block) {
    const { method } = this;
    const name = method.valueName(block.value);
    const note = method.note(block.value);
    return [
      `%${block.value}${name ? ` ${name}` : ""}`,
      `${method.text(block.value)} · ${bytes(block.nbytes)} · ${ROLES[method.role(block.value)]}`,
      `bytes ${count(block.offset)} to ${count(block.offset + block.nbytes)} of memory ${this.arena.id}`,
      this.life("born", block.born),
      this.life("dies", block.dies),
      ...(note ? [note] : []),
    ];
  }

  life(word, time) {
    return this.method.length ? `${word} at ${count(time)} ${this.method.label(time)}` : `${word} at ${count(time)}`;
  }

  press(event) {
    const start = this.point(event);
    const move = oncePerFrame((next) => {
      if (!move.done) {
        this.frame = [...start, ...this.point(next)];
        this.redraw();
      }
    });
    const release = (last) => {
      move.done = true;
      removeEventListener("mousemove", move);
      removeEventListener("mouseup", release);
      const end = this.point(last);
      this.frame = null;
      if (Math.abs(end[0] - start[0]) < 5 && Math.abs(end[1] - start[1]) < 5) this.choose(this.at(...start));
      else this.zoomTo(start, end);
    };
    tooltip.hide();
    addEventListener("mousemove", move);
    addEventListener("mouseup", release);
  }

  zoomTo([x0, y0], [x1, y1]) {
    const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
    const times = [this.time(x0), this.time(x1)].map((t) => clamp(t, 0, this.method.length)).sort((a, b) => a - b);
    const offsets = [this.offset(y0), this.offset(y1)].map((o) => clamp(o, 0, this.top)).sort((a, b) => a - b);
    if (times[1] - times[0] >= 0.5) [this.view.from, this.view.to] = times;
    if (offsets[1] - offsets[0] >= 1) [this.view.low, this.view.high] = offsets;
    this.redraw();
  }

  zoom(factor) {
    const middle = this.selected ? (this.selected.born + this.selected.dies + 1) / 2 : (this.view.from + this.view.to) / 2;
    const span = Math.min(this.method.length, Math.max(2, (this.view.to - this.view.from) * factor));
    const from = Math.max(0, Math.min(this.method.length - span, middle - span / 2));
    Object.assign(this.view, { from, to: Math.max(from + 1, from + span) });
    this.redraw();
  }

  choose(block) {
    this.selected = block;
    if (!block) this.status.replaceChildren(this.hint());
    else {
      const lines = this.describe(block).flatMap((line) => [named(line), " · "]).slice(0, -1);
      const open = h("button", { type: "button", onclick: () => this.opened(block.born) }, `show instruction ${count(block.born)}`);
      this.status.replaceChildren(...lines, " ", open);
      if (block.dies + 1 < this.view.from || block.born > this.view.to) {
        const span = this.view.to - this.view.from;
        const from = Math.max(0, Math.min(this.method.length - span, block.born - span / 2));
        Object.assign(this.view, { from, to: from + span });
      }
      if (block.offset + block.nbytes < this.view.low || block.offset > this.view.high) {
        Object.assign(this.view, { low: 0, high: this.top });
      }
    }
    this.redraw();
  }

  /** Mark the column of an instruction. */
  markTime(time) {
    this.cursor = time;
    this.redraw();
  }

  /** Dim all values except `values`; null shows all. */
  highlight(values) {
    this.matches = values;
    this.redraw();
  }

  neighbour(key) {
    const { blocks, selected } = this;
    if (!selected) return blocks[0];
    if (key === "ArrowRight" || key === "ArrowLeft") {
      const index = blocks.indexOf(selected) + (key === "ArrowRight" ? 1 : -1);
      return blocks[Math.max(0, Math.min(blocks.length - 1, index))];
    }
    const above = key === "ArrowUp";
    const beside = blocks.filter(
      (b) => b !== selected && b.born <= selected.dies && b.dies >= selected.born &&
        (above ? b.offset > selected.offset : b.offset < selected.offset),
    );
    const distance = (b) => Math.abs(b.offset - selected.offset);
    return beside.reduce((best, b) => (distance(b) < distance(best) ? b : best), beside[0] ?? selected);
  }

  key(event) {
    if (event.key.startsWith("Arrow")) this.choose(this.neighbour(event.key) ?? null);
    else if (event.key === "Home") this.choose(this.blocks[0] ?? null);
    else if (event.key === "End") this.choose(this.blocks.at(-1) ?? null);
    else if (event.key === "Enter" && this.selected) this.opened(this.selected.born);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.reset();
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }
}

function memoryViews(method, opened) {
  const views = method.data.arenas.map((arena) => new MemoryView(method, arena, opened));
  const none = views.length ? [] : [h("p", { class: "none" }, "This method plans no memory.")];
  return { views, elements: [...views.map((view) => view.element), ...none] };
}

const MEMORY_ABOUT =
  "Each rectangle is one value: as high as its bytes, at its offset in memory, as long as it is needed.";
