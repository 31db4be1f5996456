// Accessors of the page data.

const KINDS = { m: "move", j: "jump if false", f: "free" };
const ROLES = {
  i: "input",
  o: "output",
  b: "input and output",
  c: "constant",
  x: "external constant",
  s: "state",
  t: "intermediate",
  l: "list of tensors",
  "-": "value",
};

class Method {
  constructor(file, data) {
    this.file = file;
    this.data = data;
    this.name = data.name;
    this.length = data.instructions.kind.length;
    this.searchable = [];
  }

  /** Operator, delegate or kind of an instruction. */
  label(index) {
    const { kind, target } = this.data.instructions;
    if (kind[index] === "k") return this.data.operators[target[index]]?.name ?? `operator ${target[index]}?`;
    if (kind[index] === "d") return `delegate ${this.data.delegates[target[index]]?.id ?? target[index]}`;
    return KINDS[kind[index]];
  }

  isDelegate(index) {
    return this.data.instructions.kind[index] === "d";
  }

  delegate(index) {
    return this.data.delegates[this.data.instructions.target[index]] ?? null;
  }

  arguments(index) {
    return this.data.instructions.args[index];
  }

  text(value) {
    return this.file.texts[this.data.values.text[value]] ?? "?";
  }

  valueName(value) {
    const name = this.data.values.name[value];
    return name >= 0 ? this.file.texts[name] : null;
  }

  note(value) {
    const note = this.data.values.note[value];
    return note >= 0 ? this.file.texts[note] : null;
  }

  role(value) {
    return this.data.values.role[value] ?? "-";
  }

  nbytes(value) {
    return this.data.values.nbytes[value] ?? 0;
  }

  /** Short text of a value: the number of a tensor, the text of another value. */
  short(value) {
    return this.role(value) === "-" ? this.text(value) : `%${value}`;
  }

  long(value) {
    const name = this.valueName(value);
    return `%${value} ${this.text(value)}${name ? ` ${name}` : ""}`;
  }

  /** Values that an instruction writes and reads, as far as the file distinguishes them. */
  split(index) {
    const args = this.arguments(index);
    const kind = this.data.instructions.kind[index];
    if (kind === "m") return { made: [args[1]], read: [args[0]] };
    if (kind === "d") {
      // The file does not separate a delegate's inputs from its outputs: a value first used here is an output.
      const made = args.filter((value) => this.births.get(value) === index && "to".includes(this.role(value)));
      return { made, read: args.filter((value) => !made.includes(value)) };
    }
    if (kind !== "k") return { made: [], read: args };
    const outs = this.data.instructions.outs[index];
    const made = outs > 1 ? args.slice(-outs, -1) : args.slice(-1);
    return { made, read: args.slice(0, args.length - outs) };
  }

  get births() {
    this.bornAt ??= new Map(this.data.arenas.flatMap((arena) => arena.blocks.map((block) => [block[0], block[3]])));
    return this.bornAt;
  }

  summary(index) {
    const { made, read } = this.split(index);
    const list = read.slice(0, 24).map((value) => this.short(value)).join(", ");
    const more = read.length > 24 ? ", …" : "";
    if (this.data.instructions.kind[index] === "j") {
      return `${list} → ${this.data.instructions.target[index]}`;
    }
    const others = made.length > 1 ? ` and ${made.length - 1} more` : "";
    const result = made.length ? `%${made[0]} ${this.text(made[0])}${others} ← ` : "";
    return `${result}(${list}${more})`;
  }

  stack(index) {
    const number = this.data.instructions.stack[index];
    if (number < 0) return [];
    return this.data.instructions.stacks[number].map((frame) => this.file.frames[frame]);
  }

  /** Innermost source line of an instruction, outside installed packages if possible. */
  source(index) {
    const frames = this.stack(index);
    const frame = frames.findLast(([file]) => !/[\\/](site|dist)-packages[\\/]/.test(file)) ?? frames.at(-1);
    return frame ? `${frame[0].split(/[\\/]/).at(-1)}:${frame[1]}` : "";
  }

  /** Names of the modules of an instruction, the outermost first; null if unknown. */
  module(index) {
    const told = this.watched(index)?.module;
    if (told) return told.split(".").slice(0, MOST_LEVELS);
    for (const value of this.arguments(index)) {
      // The name of a parameter contains the path of its module.
      const name = "cxs".includes(this.role(value)) ? this.valueName(value) : null;
      if (name?.includes(".")) return name.split(".").slice(0, -1).slice(0, MOST_LEVELS);
    }
    return null;
  }

  /** Whether the module of an instruction is known only from parameter names, not from a trace. */
  get guessesModules() {
    return Array.from({ length: this.length }, (_, index) => index).some((index) => !this.watched(index)?.module && this.module(index));
  }

  /** Texts of the operators in the delegate that an instruction calls. */
  parts(index) {
    const delegate = this.isDelegate(index) ? this.delegate(index) : null;
    return delegate && delegate.graph >= 0 ? this.file.texts[delegate.graph].split("\n") : [];
  }

  /** Measurements of an instruction from a trace. */
  watched(index) {
    return this.data.watched?.[index];
  }

  get times() {
    return Boolean(this.data.watched);
  }

  /** Time of an entry of the outline in microseconds; null if unknown. */
  spent(entry) {
    const watched = entry.kind === "group" ? null : this.watched(entry.index);
    if (!watched) return null;
    return entry.kind === "part" ? (watched.parts[entry.part] ?? null) : watched.time;
  }

  get hasSources() {
    return this.data.instructions.stacks.length > 0;
  }

  /** Searchable text of an instruction in lower case, cached. */
  haystack(index) {
    this.searchable[index] ??= [
      index,
      this.label(index),
      (this.module(index) ?? []).join("."),
      ...this.arguments(index).slice(0, 64).map((value) => this.long(value)),
      ...this.stack(index).map((frame) => `${frame[0]}:${frame[1]} ${frame[2]} ${frame[3]}`),
    ]
      .join(" ")
      .toLowerCase();
    return this.searchable[index];
  }

  get planned() {
    return sum(this.data.arenas.map((arena) => arena.size));
  }

  get delegateCalls() {
    return sum(this.data.delegates.map((delegate) => delegate.calls));
  }
}

class FileModel {
  constructor(data) {
    Object.assign(this, data);
    this.methods = data.methods.map((method) => new Method(this, method));
  }

  storedBytes(kind) {
    return sum(this.stored.filter((item) => item.kind === kind).map((item) => item.nbytes));
  }

  facts() {
    return {
      size: this.size,
      methods: this.methods.length,
      instructions: sum(this.methods.map((method) => method.length)),
      operators: new Set(this.methods.flatMap((method) => method.data.operators.map((o) => o.name))).size,
      delegates: sum(this.methods.map((method) => method.data.delegates.length)),
      delegateBytes: this.storedBytes("delegate"),
      constantBytes: this.storedBytes("constants") + this.storedBytes("named"),
      // In the official runtime methods share arenas, each of the largest required size.
      planned: Math.max(0, ...this.methods.map((method) => method.planned)),
    };
  }
}
