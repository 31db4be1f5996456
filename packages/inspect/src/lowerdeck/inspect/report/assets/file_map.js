// Map of the file's bytes, and a table of its stored data.

const STORED = {
  program: "program (values, instructions, names)",
  constants: "constants",
  state: "initial state",
  delegate: "delegate blobs",
  named: "named data of delegates",
  unused: "padding",
};

function fillsOf(file) {
  const totals = {};
  for (const { kind, nbytes } of file.sections) totals[kind] = (totals[kind] ?? 0) + nbytes;
  if (!file.sections.length) {
    for (const { kind, nbytes } of file.stored) totals[kind] = (totals[kind] ?? 0) + nbytes;
  }
  return totals;
}

function mapLegend(totals, whole) {
  return h(
    "ul",
    { class: "legend" },
    Object.keys(STORED)
      .filter((kind) => totals[kind])
      .map((kind) =>
        h("li", {}, h("i", { class: `swatch ${kind}` }), `${STORED[kind]} `, h("b", {}, bytes(totals[kind])), ` ${percent(totals[kind], whole)}`),
      ),
  );
}

/** The bytes of a file as a strip; overlapping parts are drawn over each other, in order of offset. */
function fileStrip(file) {
  const parts = file.sections.length
    ? file.sections
    : file.stored.reduce((list, item) => {
        const offset = list.length ? list.at(-1).offset + list.at(-1).nbytes : 0;
        return [...list, { ...item, label: item.name, offset }];
      }, []).slice(0, 5000);
  const whole = Math.max(1, ...parts.slice(-1).map((part) => part.offset + part.nbytes), file.size ?? 0);
  const height = 56;
  const x = (offset, width) => (offset / whole) * width;
  const { canvas } = sharpCanvas(
    height,
    {
      class: "strip",
      role: "img",
      "aria-label": `Map of ${file.title}: ${parts.length} parts; the table below lists them.`,
      onmousemove: oncePerFrame((event) => hover(event)),
      onmouseleave: () => tooltip.hide(),
    },
    (context, width) => {
      for (const part of parts) {
        const left = x(part.offset, width);
        const wide = Math.max(1, x(part.offset + part.nbytes, width) - left);
        context.fillStyle = color(part.kind);
        context.fillRect(left, 0, wide > 4 ? wide - 1 : wide, height);
        if (wide > 60) label(context, part, left, wide);
      }
    },
  );

  function label(context, part, left, wide) {
    context.save();
    context.beginPath();
    context.rect(left, 0, wide - 6, height);
    context.clip();
    context.fillStyle = color(`${part.kind}-ink`);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const size = bytes(part.nbytes);
    const fits = (text) => context.measureText(text).width <= wide - 14;
    if (fits(part.label)) context.fillText(part.label, left + 8, 24);
    if (fits(size)) context.fillText(size, left + 8, fits(part.label) ? 42 : 33);
    context.restore();
  }

  function hover(event) {
    const box = canvas.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * whole;
    const grace = (1.5 * whole) / box.width;
    const hit = parts
      .filter((part) => at >= part.offset - grace && at <= part.offset + part.nbytes + grace)
      .sort((a, b) => a.nbytes - b.nbytes)
      .find((part) => at >= part.offset && at <= part.offset + Math.max(part.nbytes, grace)) ?? null;
    if (!hit) return tooltip.hide();
    return tooltip.show(event.clientX, event.clientY, [
      hit.label,
      `${STORED[hit.kind]} · ${bytes(hit.nbytes)} (${percent(hit.nbytes, whole)})`,
      file.sections.length ? `from byte ${count(hit.offset)} to ${count(hit.offset + hit.nbytes)}` : "not in a file yet",
    ]);
  }

  return { element: canvas, whole };
}

function fileMapSection(file, id = "file") {
  const strip = fileStrip(file);
  const totals = fillsOf(file);
  const sections = sortableTable(
    "Sections of the file",
    [
      { title: "part", value: (part) => part.label },
      { title: "holds", value: (part) => STORED[part.kind] },
      { title: "from byte", value: (part) => part.offset, show: (part) => count(part.offset), number: true, rising: true },
      { title: "bytes", value: (part) => part.nbytes, show: (part) => bytes(part.nbytes), number: true, bar: true },
    ],
    file.sections,
    2,
  );
  const largest = file.stored[0]?.nbytes || 1;
  const counter = h("p", { class: "counter", role: "status" });
  const list = new VirtualList({
    label: "Stored constants, state, delegates and named data, largest first",
    className: "stored",
    render: (item) => [
      h("i", { class: `swatch ${item.kind}`, title: STORED[item.kind] }),
      named(item.name, { class: "op" }),
      named(item.what, { class: "args" }),
      h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width: `${(100 * item.nbytes) / largest}%` } })),
      h("span", { class: "size" }, bytes(item.nbytes)),
      h("span", { class: "size place" }, item.offset === null ? "" : `at ${count(item.offset)}`),
    ],
  });
  function filter(query) {
    const words = wordsOf(query);
    const kept = file.stored.filter((item) => {
      const text = `${item.name} ${item.what} ${item.kind}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    list.show(kept);
    counter.textContent = words.length
      ? `${count(kept.length)} of ${plural(file.stored.length, "stored item")}`
      : plural(file.stored.length, "stored item");
    return kept.length;
  }
  filter("");
  const about = file.size === null ? "This program is not in a file yet: sizes only." : `${bytes(file.size)} from the first byte to the last.`;
  return {
    filter,
    element: section(
      id,
      "What fills the file",
      about,
      strip.element,
      mapLegend(totals, file.size ?? sum(Object.values(totals))),
      file.sections.length ? h("details", {}, h("summary", {}, plural(file.sections.length, "part")), sections.element) : null,
      h("h3", {}, "Stored, largest first"),
      counter,
      list.element,
    ),
  };
}
