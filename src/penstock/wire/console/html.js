/**
 * Markup as tagged templates, escaped by default, and updates in place.
 *
 *   render(element, html`<p class="${kind}">${text}</p>`)
 *
 * What is put in is text unless it is markup itself (html`...`), a list of such, or raw(...). render()
 * parses the markup and changes only what differs from what the element shows, so focus, selection,
 * scroll position and open <details> survive an update once a second. Children with a data-key keep
 * their element when their place changes. Event handlers are not in the markup (the page's policy
 * forbids inline script): see on() and actions in app.js.
 */

/** Markup that is safe to insert as it is. */
class Markup {
  constructor(text) { this.text = text; }
  toString() { return this.text; }
}

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

/** @param {unknown} value @returns {string} */
export function escape(value) {
  return String(value).replace(/[&<>"']/g, (character) => ESCAPES[character]);
}

/** @param {unknown} value @returns {string} */
function inserted(value) {
  if (value === null || value === undefined || value === false || value === true) return "";
  if (value instanceof Markup) return value.text;
  if (Array.isArray(value)) return value.map(inserted).join("");
  return escape(value);
}

/** @returns {Markup} */
export function html(strings, ...values) {
  let text = strings[0];
  for (let i = 0; i < values.length; i += 1) text += inserted(values[i]) + strings[i + 1];
  return new Markup(text);
}

/** Show `markup` in `element`, changing no more than needed. */
export function render(element, markup) {
  const template = document.createElement("template");
  template.innerHTML = inserted(markup);
  updateChildren(element, template.content);
}

function updateChildren(element, wanted) {
  const keyed = new Map();
  for (const child of element.children) {
    const key = child.dataset?.key;
    if (key !== undefined) keyed.set(key, child);
  }
  let current = element.firstChild;
  for (const target of [...wanted.childNodes]) {
    const key = target.dataset?.key;
    const known = key === undefined ? undefined : keyed.get(key);
    if (known && known.nodeName === target.nodeName) {
      keyed.delete(key);
      if (known === current) current = current.nextSibling;
      else element.insertBefore(known, current);
      updateNode(known, target);
      continue;
    }
    if (current && key === undefined && current.dataset?.key === undefined && alike(current, target)) {
      const next = current.nextSibling;
      updateNode(current, target);
      current = next;
      continue;
    }
    element.insertBefore(target, current);
  }
  while (current) {
    const next = current.nextSibling;
    current.remove();
    current = next;
  }
}

function alike(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && a.id === b.id;
}

function updateNode(node, target) {
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (node.data !== target.data) node.data = target.data;
    return;
  }
  for (const { name } of [...node.attributes]) {
    if (!target.hasAttribute(name) && !keeps(node, name)) node.removeAttribute(name);
  }
  for (const { name, value } of target.attributes) {
    if (node.getAttribute(name) !== value && !keeps(node, name)) node.setAttribute(name, value);
  }
  if (node.hasAttribute("data-own")) return; // a component that draws its own inside
  if (node.nodeName === "TEXTAREA") {
    if (node !== document.activeElement && node.value !== target.value) node.value = target.value;
    return;
  }
  if (node.nodeName === "INPUT" && node !== document.activeElement && !node.hasAttribute("data-keep")) {
    if (node.type === "checkbox") node.checked = target.checked;
    else if (target.hasAttribute("value") && node.value !== target.value) node.value = target.value;
  }
  updateChildren(node, target);
}

/** What the person, not the page, decides: whether details are open, what a select shows. */
function keeps(node, name) {
  return name === "open" && (node.nodeName === "DETAILS" || node.nodeName === "DIALOG");
}

/** Call `handler(event, element)` for events of elements below `root` that match `selector`. */
export function on(root, type, selector, handler) {
  root.addEventListener(type, (event) => {
    const element = event.target instanceof Element ? event.target.closest(selector) : null;
    if (element && root.contains(element)) handler(event, element);
  });
}
