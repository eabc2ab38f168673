/** The records of a topic: a list from an offset or a time on, a live tail, and a single record. */
import { get, listen, path } from "../api.js";
import { html } from "../html.js";
import { count, moment, size, when } from "../format.js";
import { MODES, payload, preview, textOf, visible } from "../components/json.js";
import { table } from "../components/table.js";
import { filter, pairs, tabs } from "./common.js";

const LISTED = 50;
const MOST_TAILED = 200;
export const linkTo = (topic, ...rest) =>
  `#${["/topics", topic, ...rest].map((part, i) => (i ? encodeURIComponent(part) : part)).join("/")}`;

/** Decode base64. */
const decoded = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** Format a key or header value: text, or {base64}; null is shown as nothing. */
const word = (value) =>
  value === null ? "null" : typeof value === "string" ? visible(value) : `base64 ${value.base64}`;

const tombstone = html`<span class="badge">tombstone</span>`;

const columns = (name, partition) => [
  {
    name: "offset",
    title: "Offset",
    number: true,
    card: true,
    cell: (r) => html`<a href="${linkTo(name, partition, r.offset)}">${count(r.offset)}</a>`,
  },
  {
    name: "time",
    title: "Time",
    card: true,
    cell: (r) => html`<time title="${moment(r.time)}">${when(r.time)}</time>`,
  },
  {
    name: "key",
    title: "Key",
    cell: (r) => (r.key === undefined ? "" : html`<span class="mono">${word(r.key)}</span>`),
  },
  {
    name: "payload",
    title: "Payload",
    kind: "preview",
    card: true,
    cell: (r) => (r.payload === null ? tombstone : html`<span class="mono">${preview(String(r.payload), 200)}</span>`),
  },
  { name: "headers", title: "Headers", number: true, cell: (r) => (r.headers ? count(r.headers.length) : "") },
];

/** A page of records: from an offset or a time on, else the newest. */
export function loadRecords(name, query, signal) {
  const place = query.time ? { at: new Date(query.time).toISOString() } : { offset: query.offset };
  return get(path`/api/v1/topics/${name}/records`, { partition: query.partition, limit: LISTED, ...place }, signal);
}

/** A live tail: records as they come, in this page's own list, until it is stopped or left. */
export function tail(context) {
  const { state, params, query } = context;
  state.tail = { records: [], errors: [], ending: new AbortController() };
  const mine = state.tail;
  const seen = (value, event) => {
    if (event === "error") {
      mine.errors.push(value.error);
      context.say(value.error, "bad"); // also when the stream ends with it
    } else {
      const words = (context.query.contains ?? "").toLowerCase();
      const record = { ...value, time: value.timestamp ?? Date.now() };
      if (!words || String(value.payload).toLowerCase().includes(words)) mine.records.unshift(record);
      mine.records.length = Math.min(mine.records.length, MOST_TAILED);
    }
    context.draw();
  };
  const from = { offset: "latest", partition: query.partition };
  listen(path`/topics/${params.topic}/stream`, from, seen, mine.ending.signal)
    .catch((error) => {
      if (error.name !== "AbortError") context.say(error.message, "bad");
    })
    .finally(() => {
      if (state.tail === mine) {
        state.tail = null;
        context.draw();
      }
    });
}

/** Links to the previous and the next page. */
function pager(page, context) {
  const first = page.records[0]?.offset ?? page.next_offset;
  const after = (page.records.at(-1)?.offset ?? page.next_offset) + 1;
  const to = (offset) => context.withQuery({ offset, time: "" });
  return html`<div class="pager">
    ${first > page.first_offset ? html`<a href="${to(Math.max(page.first_offset, first - LISTED))}">← older</a>` : ""}
    ${after < page.next_offset ? html`<a href="${to(after)}">newer →</a>` : ""}
    ${context.query.offset || context.query.time ? html`<a href="${to("")}">newest</a>` : ""}
  </div>`;
}

/** The list with its jumps. `parts` are the partitions of the topic. */
export function records(page, parts, context) {
  const { state, query, params } = context;
  const partition = Number(query.partition ?? 0);
  const rows = state.tail ? state.tail.records : page.records.toReversed();
  return html`<h2>Records</h2>
    <div class="tools">
      ${
        parts.length > 1
          ? html`<label class="beside"
              >partition
              <select data-choice="partition" data-clears="offset time" aria-label="Partition">
                ${parts.map(
                  (one) =>
                    html`<option value="${one.partition}" .selected="${one.partition === partition}">
                      ${one.partition}
                    </option>`,
                )}
              </select></label
            >`
          : ""
      }
      <label class="beside"
        >from offset
        <input
          type="number"
          min="0"
          data-choice="offset"
          data-clears="time"
          value="${query.offset ?? page.records[0]?.offset ?? page.first_offset}"
      /></label>
      <label class="beside"
        >from time
        <input type="datetime-local" step="1" data-choice="time" data-clears="offset" value="${query.time ?? ""}"
      /></label>
      ${filter(query, "Tail only records that contain", "contains")}
      <button data-action="tail" aria-pressed="${state.tail ? "true" : "false"}">
        ${state.tail ? "Stop live tail" : "Live tail"}
      </button>
    </div>
    ${(state.tail?.errors ?? []).map((text) => html`<p class="problem" role="alert">${visible(text)}</p>`)}
    ${table({
      // Records of the aiq format have neither keys nor headers.
      columns: columns(params.topic, partition).filter(
        ({ name }) => !["key", "headers"].includes(name) || rows.some((r) => r[name] !== undefined),
      ),
      rows,
      key: (r) => r.offset,
      href: (r) => linkTo(params.topic, partition, r.offset),
      caption: "Records",
      empty: state.tail ? "Waiting for records …" : "No record here.",
    })}
    ${state.tail ? "" : pager(page, context)}`;
}

const crumbs = ({ topic, partition, offset }) =>
  html`<a href="#/topics">Topics</a> / <a href="${linkTo(topic)}?partition=${partition}">${topic}</a> / ${partition} /
    <b>${offset}</b>`;

export const record = {
  path: "/topics/:topic/:partition/:offset",
  title: ({ topic, offset }) => `${topic} ${offset}`,
  crumbs,
  every: 30_000,
  async load({ topic, partition, offset }, _, signal) {
    const [[whole], page] = await Promise.all([
      get(path`/topics/${topic}/consume`, { partition, offset, max_messages: 1 }, signal),
      get(path`/api/v1/topics/${topic}/records`, { partition, offset, limit: 1 }, signal),
    ]);
    const found = whole?.offset === Number(offset) ? whole : null;
    return { found, time: page.records[0]?.time, first: page.first_offset, next: page.next_offset };
  },
  view({ found, time, first, next }, context) {
    const { topic, partition, offset } = context.params;
    const to = (number, text) => html`<a class="button" href="${linkTo(topic, partition, number)}">${text}</a>`;
    const at = Number(offset);
    const steps = html`<div class="tools">
      ${at > first ? to(at - 1, "← previous") : ""} ${at + 1 < next ? to(at + 1, "next →") : ""}
      ${
        found?.payload && !found.encoding
          ? html`<button data-action="copy" data-text="${found.payload}">Copy payload</button>`
          : ""
      }
    </div>`;
    const title = html`<h1>${topic} <small>partition ${partition}, offset ${count(at)}</small></h1>`;
    if (!found) {
      return html`${title}${steps}
        <p>There is no record with this offset: it was removed, compacted away, or does not exist yet.</p>`;
    }
    const body = found.encoding ? decoded(found.payload) : new TextEncoder().encode(found.payload ?? "");
    const mode = context.query.mode ?? (found.encoding ? "hex" : "json");
    const form = tabs(
      MODES.map((one) => [one, one]),
      mode,
      (one) => context.withQuery({ mode: one }),
      "View of the payload",
    );
    return html`${title}${steps}
      <div class="cards">
        <div class="card">
          ${found.payload === null ? tombstone : html`${form}${payload(found.encoding ? body : textOf(body), mode)}`}
        </div>
        <div class="card">
          ${pairs([
            ["time", moment(time)],
            ["size", size(body.length)],
            ["key", found.key === undefined ? "–" : html`<code>${word(found.key)}</code>`],
            ...(found.headers ?? []).map(([name, value]) => [
              html`header <code>${visible(name)}</code>`,
              html`<code>${word(value)}</code>`,
            ]),
          ])}
        </div>
      </div>`;
  },
};
