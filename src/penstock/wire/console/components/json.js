/**
 * A payload as a tree, as text and as bytes. Whatever it holds is shown as text: control characters
 * are made visible, long ones are cut with a button for the rest, and depth is bounded.
 */
import { html } from "../html.js";
import { count } from "../format.js";

const LONGEST_TEXT = 20_000;
const MOST_CHILDREN = 200;
const DEEPEST = 40;

/** Control characters as their pictures (␀ ␛ ...), so that nothing acts and nothing hides. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u0080-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (character) => {
      const code = character.codePointAt(0);
      if (code < 0x20) return String.fromCodePoint(0x2400 + code);
      return `\\u${code.toString(16).padStart(4, "0")}`;
    });
}

function cut(text) {
  if (text.length <= LONGEST_TEXT) return visible(text);
  return `${visible(text.slice(0, LONGEST_TEXT))} … (${count(text.length)} characters)`;
}

function leaf(value) {
  if (typeof value === "string") return html`<span class="json-string">${cut(JSON.stringify(value))}</span>`;
  return html`<span class="json-${value === null ? "null" : typeof value}">${String(value)}</span>`;
}

/** @param {unknown} value parsed JSON */
export function tree(value, name = null, depth = 0) {
  const label = name === null ? "" : html`<span class="json-name">${visible(String(name))}</span>: `;
  if (value === null || typeof value !== "object") return html`<div class="json">${label}${leaf(value)}</div>`;
  const list = Array.isArray(value);
  const names = list ? value.map((_, i) => i) : Object.keys(value);
  const about = list ? `[${count(names.length)}]` : `{${count(names.length)}}`;
  if (!names.length) return html`<div class="json">${label}${list ? "[]" : "{}"}</div>`;
  if (depth >= DEEPEST) return html`<div class="json">${label}${about} nested deeper than ${DEEPEST} levels: see raw</div>`;
  const shown = names.slice(0, MOST_CHILDREN);
  return html`<details class="json" ${depth < 3 ? html`open` : ""}><summary>${label}<span class="json-about">${about}</span></summary>
    ${shown.map((child) => tree(value[child], child, depth + 1))}
    ${names.length > shown.length ? html`<div class="json">… ${count(names.length - shown.length)} more: see raw</div>` : ""}</details>`;
}

/** Offset, bytes in hexadecimal, and what of them is printable; at most `most` bytes. */
export function hex(bytes, most = 4096) {
  const rows = [];
  for (let at = 0; at < Math.min(bytes.length, most); at += 16) {
    const row = [...bytes.slice(at, at + 16)];
    const digits = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    const text = row.map((byte) => (byte >= 0x20 && byte < 0x7f ? String.fromCharCode(byte) : "·")).join("");
    rows.push(`${at.toString(16).padStart(6, "0")}  ${digits}  ${text}`);
  }
  if (bytes.length > most) rows.push(`… ${count(bytes.length - most)} bytes more`);
  return html`<pre class="hex">${rows.join("\n")}</pre>`;
}

/** A payload in the way `mode` says: json, raw or hex. `text` is what came over the wire. */
export function payload(text, mode, bytes = new TextEncoder().encode(text)) {
  if (mode === "hex") return hex(bytes);
  if (mode === "json") {
    try {
      return tree(JSON.parse(text));
    } catch { /* it is no JSON, or nested too deeply to parse: shown as it is */ }
  }
  return html`<pre class="raw">${cut(text)}</pre>`;
}
