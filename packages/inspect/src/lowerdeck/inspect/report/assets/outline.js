// Outline of a method's instructions by module, with the operators of delegates.

const MOST_LEVELS = 12;
const MOST_PARTS_OPEN = 200;
const MODULES_GUESSED = "Modules are guessed from names of parameters; an instruction without parameters is shown in the common module of its neighbours.";

/** Entries in order: {kind: "group" | "step" | "part", depth, index, ...}. */
class Outline {
  constructor(method) {
    this.method = method;
    this.closed = new Set();
    this.entries = [];
    this.steps = new Map();
    const root = { path: [], children: [], count: 0 };
    const open = [root];
    modulesOf(method).forEach((path, index) => {
      while (!open.at(-1).path.every((name, level) => path[level] === name)) open.pop();
      while (open.at(-1).path.length < path.length) {
        const group = { path: path.slice(0, open.at(-1).path.length + 1), children: [], count: 0 };
        open.at(-1).children.push(group);
        open.push(group);
      }
      open.at(-1).children.push(index);
      for (const group of open) group.count += 1;
    });
    this.flatten(root, 0);
    this.hasParts = this.entries.some((entry) => entry.kind === "part");
    if (this.entries.filter((entry) => entry.kind === "part").length > MOST_PARTS_OPEN) {
      for (const entry of this.entries) if (entry.kind === "step" && entry.parts) this.closed.add(entry);
    }
  }

  flatten(group, depth) {
    for (const child of group.children) {
      if (typeof child === "number") this.add(child, depth);
      else if (child.count === 1 || (child.children.length === 1 && typeof child.children[0] !== "number")) {
        // A module with one instruction, or with one module only, has no entry.
        this.flatten(child, depth);
      } else {
        this.entries.push({ kind: "group", depth, name: child.path.join("."), count: child.count });
        this.flatten(child, depth + 1);
      }
    }
  }

  add(index, depth) {
    const parts = this.method.parts(index);
    const step = { kind: "step", depth, index, parts: parts.length };
    this.steps.set(index, step);
    this.entries.push(step);
    parts.forEach((text, part) => this.entries.push({ kind: "part", depth: depth + 1, index, part, text }));
  }

  /** Whether an entry has members. */
  holds(entry) {
    return entry.kind === "group" || Boolean(entry.parts);
  }

  get hasHolders() {
    return this.entries.some((entry) => this.holds(entry));
  }

  /** The parent of an entry, or null. */
  holderOf(entry) {
    let at = this.entries.indexOf(entry);
    while (at >= 0 && this.entries[at].depth >= (entry?.depth ?? 0)) at -= 1;
    return this.entries[at] ?? null;
  }

  toggle(entry, open = this.closed.has(entry)) {
    if (!this.holds(entry)) return;
    if (open) this.closed.delete(entry);
    else this.closed.add(entry);
  }

  toggleAll(open) {
    this.closed.clear();
    if (!open) for (const entry of this.entries) if (this.holds(entry)) this.closed.add(entry);
  }

  /** Open all ancestors of an entry. */
  uncover(wanted) {
    let depth = wanted.depth;
    for (let at = this.entries.indexOf(wanted); at >= 0 && depth > 0; at -= 1) {
      const entry = this.entries[at];
      if (entry.depth < depth) {
        depth = entry.depth;
        this.closed.delete(entry);
      }
    }
  }

  visible() {
    const seen = [];
    let hidden = Infinity;
    for (const entry of this.entries) {
      if (entry.depth > hidden) continue;
      hidden = this.closed.has(entry) ? entry.depth : Infinity;
      seen.push(entry);
    }
    return seen;
  }

  /** Entries that contain all words, with their ancestors. */
  found(words) {
    const has = (text) => words.every((word) => text.includes(word));
    const kept = new Set();
    const above = [];
    const steps = [];
    const hits = [];
    for (const entry of this.entries) {
      above.length = entry.depth;
      above[entry.depth] = entry;
      const isStep = entry.kind === "step" && has(this.method.haystack(entry.index));
      if (isStep) steps.push(entry.index);
      if (isStep || (entry.kind === "part" && has(entry.text.toLowerCase()))) {
        hits.push(entry);
        for (const one of above) if (one) kept.add(one);
      }
    }
    return { shown: this.entries.filter((entry) => kept.has(entry)), hits, steps };
  }
}

/** Module names of each instruction, the outermost first. */
function modulesOf(method) {
  const own = Array.from({ length: method.length }, (_, index) => method.module(index));
  let before = null;
  let after = null;
  let nextKnown = -1;
  return own.map((path, index) => {
    if (path !== null) {
      before = path;
      return path;
    }
    // Unknown module: use the common ancestor of the known modules before and after.
    if (nextKnown < index) {
      nextKnown = index;
      while (nextKnown < own.length && own[nextKnown] === null) nextKnown += 1;
      after = own[nextKnown] ?? null;
    }
    if (before === null || after === null) return [];
    const different = before.findIndex((name, level) => after[level] !== name);
    return different < 0 ? before : before.slice(0, different);
  });
}
