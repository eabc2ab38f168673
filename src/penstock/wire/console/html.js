/**
 * Markup as tagged templates, and updates of what changed.
 *
 *   render(element, html`<p class="${kind}">${text}</p>`)
 *
 * The text between the `${}` never changes, so each template is parsed once, the first time it is drawn.
 * After that, render() compares every value with the one it drew before and changes only those that differ.
 * Focus, selection, scroll position and open <details> therefore survive an update once a second.
 *
 * A value in the content may be text (never markup: it is put into a text node), another template, or an
 * array. Templates of each() keep their elements when their place in the array changes. A value of an
 * attribute may be part of its text; alone, `false`, `null` and `undefined` remove the attribute. Two kinds
 * of names are special: `?name` sets or removes an attribute, `.name` sets a property of the element.
 *
 * Event handlers are not in the markup (the page's policy forbids inline script): see on().
 */

class Template {
  constructor(strings, values, space) {
    this.strings = strings;
    this.values = values;
    this.space = space; // of the markup: html or svg
    this.key = null; // in an array
  }
}

/** @returns {Template} */
export const html = (strings, ...values) => new Template(strings, values, "html");

/** Markup that goes into an <svg>. @returns {Template} */
export const svg = (strings, ...values) => new Template(strings, values, "svg");

/** A template for each item, known by its key. */
export function each(items, key, draw) {
  return items.map((item, i) => {
    const template = draw(item, i);
    template.key = String(key(item, i));
    return template;
  });
}

// Parsing: what is fixed, and where the values go

const MARK = /\{\{(\d+)\}\}/;
const blueprints = new WeakMap(); // the strings of a template -> { content, places }

function blueprint({ strings, space }) {
  let known = blueprints.get(strings);
  if (!known) {
    known = parse(strings, space);
    blueprints.set(strings, known);
  }
  return known;
}

function parse(strings, space) {
  let text = strings[0];
  for (let i = 1; i < strings.length; i += 1) {
    const inTag = text.lastIndexOf("<") > text.lastIndexOf(">");
    text += (inTag ? `{{${i - 1}}}` : `<!--{{${i - 1}}}-->`) + strings[i];
  }
  const element = document.createElement("template");
  element.innerHTML = space === "svg" ? `<svg>${text}</svg>` : text;
  if (space === "svg") element.content.replaceChildren(...element.content.firstChild.childNodes);
  for (const block of element.content.querySelectorAll(BLOCKS)) trim(block);
  const places = [];
  const walker = walk(element.content);
  for (let node = 0; walker.nextNode(); node += 1) {
    const current = walker.currentNode;
    if (current.nodeType === Node.COMMENT_NODE) {
      const mark = current.data.match(MARK);
      if (mark) places.push({ node, value: Number(mark[1]) });
      continue;
    }
    for (const { name, value } of [...current.attributes]) {
      if (!MARK.test(value)) continue;
      const pieces = value.split(MARK).map((piece, i) => (i % 2 ? Number(piece) : piece));
      places.push({ node, name, pieces });
      current.removeAttribute(name);
    }
  }
  return { content: element.content, places };
}

const BLOCKS = "td, th, li, p, div, h1, h2, dt, dd, option, button, caption, b, small";

/** Drop the white space inside the ends of an element, which is there only for the reader of the template. */
function trim({ firstChild, lastChild }) {
  if (firstChild instanceof Text) firstChild.data = firstChild.data.trimStart();
  if (lastChild instanceof Text) lastChild.data = lastChild.data.trimEnd();
}

const walk = (root) => document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_COMMENT);

// Drawing

/** The drawn form of a template. */
class Instance {
  constructor(template) {
    const { content, places } = blueprint(template);
    this.strings = template.strings;
    this.content = document.importNode(content, true);
    const nodes = [];
    for (const walker = walk(this.content); walker.nextNode();) nodes.push(walker.currentNode);
    this.parts = places.map((place) =>
      place.name ? new Attribute(nodes[place.node], place) : new Slot(nodes[place.node], place.value),
    );
  }

  update(values) {
    for (const part of this.parts) part.update(values);
  }
}

class Attribute {
  constructor(element, { name, pieces }) {
    this.element = element;
    this.name = name;
    this.pieces = pieces;
    this.alone = pieces.length === 3 && pieces[0] === "" && pieces[2] === "";
    this.drawn = null; // what it shows; there is no attribute yet
  }

  update(values) {
    const value = this.alone
      ? values[this.pieces[1]]
      : this.pieces.map((piece, i) => (i % 2 ? (values[piece] ?? "") : piece)).join("");
    if (value !== this.drawn) this.set(value);
    this.drawn = value;
  }

  set(value) {
    const { element, name } = this;
    if (name === ".dataset") Object.assign(element.dataset, value);
    else if (name.startsWith(".")) element[name.slice(1)] = value;
    else if (name.startsWith("?")) element.toggleAttribute(name.slice(1), Boolean(value));
    else if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else if (name !== "value" || element.nodeName !== "INPUT") element.setAttribute(name, value);
    else if (element !== document.activeElement) element.value = value; // never under somebody's fingers
  }
}

/** A place in the content: whatever lies between two comments. */
class Slot {
  /** @param {Comment} end @param {number} index of its value */
  constructor(end, index) {
    this.start = document.createComment("");
    this.end = end;
    this.index = index;
    this.shown = null; // a text node, an Instance, or a Map of Slots
    end.before(this.start);
  }

  update(values) {
    this.set(values[this.index]);
  }

  set(value) {
    if (value instanceof Template) this.setTemplate(value);
    else if (Array.isArray(value)) this.setList(value);
    else this.setText(value === null || value === undefined || typeof value === "boolean" ? "" : String(value));
  }

  setText(text) {
    if (!(this.shown instanceof Text)) {
      this.clear();
      this.shown = document.createTextNode(text);
      this.end.before(this.shown);
    } else if (this.shown.data !== text) this.shown.data = text;
  }

  setTemplate(template) {
    if (!(this.shown instanceof Instance) || this.shown.strings !== template.strings) {
      this.clear();
      this.shown = new Instance(template);
      this.shown.update(template.values);
      this.end.before(this.shown.content);
    } else this.shown.update(template.values);
  }

  setList(list) {
    if (!(this.shown instanceof Map)) {
      this.clear();
      this.shown = new Map();
    }
    const wanted = new Map();
    for (const [i, value] of list.entries()) {
      const key = value?.key ?? `#${i}`;
      wanted.set(wanted.has(key) ? `${key}#${i}` : key, value);
    }
    for (const [key, slot] of this.shown) {
      if (!wanted.has(key)) slot.remove();
    }
    const slots = new Map();
    let before = this.start;
    for (const [key, value] of wanted) {
      const slot = this.shown.get(key) ?? Slot.after(before);
      if (before.nextSibling !== slot.start) slot.moveAfter(before);
      slot.set(value);
      slots.set(key, slot);
      before = slot.end;
    }
    this.shown = slots;
  }

  static after(node) {
    const end = document.createComment("");
    node.after(end);
    return new Slot(end, 0);
  }

  *nodes() {
    for (let node = this.start; node !== this.end; node = node.nextSibling) yield node;
    yield this.end;
  }

  moveAfter(node) {
    node.after(...this.nodes());
  }

  remove() {
    for (const node of [...this.nodes()]) node.remove();
  }

  clear() {
    while (this.start.nextSibling !== this.end) this.start.nextSibling.remove();
  }
}

const roots = new WeakMap(); // element -> the Slot of its content

/** Show `value` in `element`, changing no more than needed. */
export function render(element, value) {
  let slot = roots.get(element);
  if (!slot) {
    element.replaceChildren(document.createComment(""));
    slot = new Slot(element.firstChild, 0);
    roots.set(element, slot);
  }
  slot.set(value);
}

/** Call `handler(event, element)` for events of elements below `root` that match `selector`. */
export function on(root, type, selector, handler) {
  root.addEventListener(type, (event) => {
    const element = event.target instanceof Element ? event.target.closest(selector) : null;
    if (element && root.contains(element)) handler(event, element);
  });
}
