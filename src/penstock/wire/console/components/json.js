/**
 * A payload as a tree, as text and as bytes.
 *
 * A payload stays the bytes that the broker sent until a tree is drawn of it, and even the tree shows each
 * number by its own digits: `JSON.parse` would change integers above 2^53 and decimals. Whatever a payload
 * contains is shown as text: control characters are made visible, long text is cut, and depth is bounded.
 */
import { html } from "../html.js";
import { count } from "../format.js";

const LONGEST_TEXT = 20_000;
const MOST_CHILDREN = 200;
const DEEPEST = 40;

// biome-ignore lint/suspicious/noControlCharactersInRegex: these are the characters to make visible
const INVISIBLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Control characters as their pictures (␀ ␛ ...), so that nothing acts and nothing hides. */
export function visible(text) {
  return text.replace(INVISIBLE, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

function cut(text) {
  if (text.length <= LONGEST_TEXT) return visible(text);
  return `${visible(text.slice(0, LONGEST_TEXT))} … (${count(text.length)} characters; Copy has all of them)`;
}

/** A number as it was written. */
class Digits {
  constructor(text) {
    this.text = text;
  }
}

/** Parse JSON; numbers become Digits if the browser gives their source text. */
const parse = (text) =>
  JSON.parse(text, (_, value, context) =>
    typeof value === "number" && context?.source ? new Digits(context.source) : value,
  );

function leaf(value) {
  if (value instanceof Digits) return html`<span class="json-number">${cut(value.text)}</span>`;
  if (typeof value === "string") return html`<span class="json-string">${cut(JSON.stringify(value))}</span>`;
  return html`<span class="json-${value === null ? "null" : typeof value}">${String(value)}</span>`;
}

/** @param {unknown} value of parse() */
function tree(value, name = null, depth = 0) {
  const label = name === null ? "" : html`<span class="json-name">${visible(String(name))}</span>: `;
  const list = Array.isArray(value);
  const plain = value === null || typeof value !== "object" || value instanceof Digits;
  if (plain) return html`<div class="json">${label}${leaf(value)}</div>`;
  const names = list ? value.map((_, i) => i) : Object.keys(value);
  const about = list ? `[${count(names.length)}]` : `{${count(names.length)}}`;
  if (!names.length) return html`<div class="json">${label}${list ? "[]" : "{}"}</div>`;
  if (depth >= DEEPEST) {
    return html`<div class="json">${label}${about} nested deeper than ${DEEPEST} levels: see raw</div>`;
  }
  const shown = names.slice(0, MOST_CHILDREN);
  const rest = names.length - shown.length;
  return html`<details class="json" ?open="${depth < 3}">
    <summary>${label}<span class="json-about">${about}</span></summary>
    ${shown.map((child) => tree(value[child], child, depth + 1))}
    ${rest ? html`<div class="json">… ${count(rest)} more: see raw</div>` : ""}
  </details>`;
}

/** Offset, bytes in hexadecimal, and what of them is printable; at most `most` bytes. */
function hex(bytes, most = 4096) {
  const rows = [];
  for (let at = 0; at < Math.min(bytes.length, most); at += 16) {
    const row = [...bytes.slice(at, at + 16)];
    const digits = row.map((byte) => byte.toString(16).padStart(2, "0"));
    const text = row.map((byte) => (byte >= 0x20 && byte < 0x7f ? String.fromCharCode(byte) : "·"));
    rows.push(`${at.toString(16).padStart(6, "0")}  ${digits.join(" ").padEnd(47)}  ${text.join("")}`);
  }
  if (bytes.length > most) rows.push(`… ${count(bytes.length - most)} bytes more`);
  return html`<pre class="hex">${rows.join("\n")}</pre>`;
}

export const MODES = ["json", "raw", "hex"];

export const textOf = (bytes) => new TextDecoder().decode(bytes);

/** A payload in the way that `mode` says. @param {Uint8Array|string} given @param {string} mode */
export function payload(given, mode = "json") {
  if (mode === "hex") return hex(typeof given === "string" ? new TextEncoder().encode(given) : given);
  const text = typeof given === "string" ? given : textOf(given);
  if (mode === "json") {
    try {
      return tree(parse(text));
    } catch {
      // Not JSON, or nested too deeply to parse: the text itself is shown.
    }
  }
  return html`<pre class="raw">${cut(text)}</pre>`;
}

/** The beginning of a payload, on one line. */
export const preview = (text, most = 120) => visible(text.length > most ? `${text.slice(0, most)}…` : text);
