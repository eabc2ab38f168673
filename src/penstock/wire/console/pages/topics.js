/** Topics: size, rates, groups and lag; one topic with its records, a live tail, and what can be done. */
import { ask, get, listen, path } from "../api.js";
import { html } from "../html.js";
import { clock, count, duration, plural, rate, size } from "../format.js";
import { sparkline } from "../components/chart.js";
import { confirm, form } from "../components/dialog.js";
import { payload, visible } from "../components/json.js";
import { table } from "../components/table.js";
import { age, bad, button, figure, filter, pager, since, teach } from "./common.js";
import { loadRolledUp, rolledUp } from "./history.js";

const linkTo = (topic) => `#/topics/${encodeURIComponent(topic)}`;
const MOST_TAILED = 200;

const COLUMNS = [
  { name: "name", title: "Topic", sort: true, cell: (t) => html`<a href="${linkTo(t.name)}">${t.name}</a>` },
  { name: "records", title: "Records", number: true, card: true, sort: true, cell: (t) => count(t.records) },
  { name: "bytes", title: "Size", number: true, sort: true, cell: (t) => size(t.bytes) },
  { name: "rate", title: "Records/s", number: true, sort: true, cell: (t) => rate(t.rate) },
  { name: "history", title: "Trend", cell: (t) => sparkline(t.history, "produced", `records per second of ${t.name}`) },
  { name: "groups", title: "Groups", number: true, sort: true, cell: (t) => count(t.groups) },
  { name: "worstLag", title: "Largest lag", number: true, sort: true, cell: (t) => count(t.worstLag) },
  { name: "segments", title: "Segments", number: true, sort: true, cell: (t) => count(t.segments) },
  { name: "policy", title: "Policy", cell: (t) => t.policy },
  { name: "damaged", title: "Damaged", number: true, cell: (t) => bad(t.damaged) },
];

export const topics = {
  path: "/topics",
  title: () => "Topics",
  load: (_, query, signal) =>
    get(
      "/topics",
      {
        details: true,
        filter: query.filter,
        sort: query.sort ?? "name",
        limit: query.limit ?? 50,
        offset: query.offset,
      },
      signal,
    ),
  view(data, context) {
    const { query } = context;
    return html`<h1>Topics</h1>
      <div class="tools">
        ${filter(query, "Filter by name")}${button(context, "admin", "scrub", "Verify all segments")}${button(context, "read_write", "create", "Create a topic", { primary: true })}
      </div>
      ${table({
        columns: COLUMNS,
        rows: data.topics,
        key: (t) => t.name,
        href: (t) => linkTo(t.name),
        sort: query.sort ?? "name",
        caption: "Topics",
        empty: query.filter
          ? "No topic matches."
          : teach("There is no topic yet.", "echo hello | penstock topic produce greetings"),
      })}
      ${pager(query, data.total, data.topics.length, context)}`;
  },
  actions: {
    async scrub(_, { say }) {
      if (
        !(await confirm({
          title: "Verify all segments",
          text: html`<p>
            The broker reads every sealed segment and verifies its checksums, at a limited rate. Damage is reported in
            this list and in the log.
          </p>`,
          button: "Verify now",
          danger: false,
        }))
      )
        return;
      await ask("POST", "/api/v1/scrub");
      say("Verification has started.");
    },
    async create(_, context) {
      const values = await form({
        title: "Create a topic",
        button: "Create",
        fields: [{ name: "topic", label: "Name" }],
        check: async ({ topic }) => {
          try {
            await ask("POST", path`/topics/${topic.trim()}`);
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) context.go(linkTo(values.topic.trim()));
    },
  },
};

/** A live tail: records as they come, in this page's own list, until it is stopped or left. */
function tail(context) {
  const { state, params } = context;
  state.tail = { records: [], ending: new AbortController() };
  const mine = state.tail;
  const seen = (value) => {
    const records = Array.isArray(value) ? value : (value.messages ?? [value]);
    const words = (context.query.contains ?? "").toLowerCase();
    for (const record of records) {
      if (!words || String(record.payload).toLowerCase().includes(words))
        mine.records.unshift({ ...record, seen: Date.now() });
    }
    mine.records.length = Math.min(mine.records.length, MOST_TAILED);
    context.draw();
  };
  listen(path`/topics/${params.topic}/stream`, {}, seen, mine.ending.signal)
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

const RECORDS = [
  { name: "offset", title: "Offset", number: true, card: true, cell: (r) => count(r.offset) },
  {
    name: "payload",
    title: "Payload",
    kind: "text",
    card: true,
    cell: (r) =>
      html`<details>
        <summary class="mono">${visible(String(r.payload).slice(0, 200))}</summary>
        ${payload(String(r.payload), "json")}
      </details>`,
  },
];

const SEGMENTS = [
  { name: "base", title: "From offset", number: true, card: true, cell: (one) => count(one.base) },
  { name: "end", title: "Up to", number: true, cell: (one) => count(one.end) },
  { name: "records", title: "Records", number: true, card: true, cell: (one) => count(one.records) },
  { name: "bytes", title: "Size", number: true, cell: (one) => size(one.bytes) },
  {
    name: "newest",
    title: "Newest record",
    number: true,
    cell: (one) => (one.records ? since(one.newest * 1000) : "–"),
  },
  {
    name: "state",
    title: "State",
    cell: (one) =>
      html`<span class="badge">${one.sealed ? "sealed" : "being written"}</span
        >${one.compacted ? html` <span class="badge">compacted</span>` : ""}${one.local ? "" : html` <span class="badge">in the tier only</span>`}`,
  },
];

/** What becomes of old records, in words. */
function retention({ policy, retention: { bytes, age: seconds } }) {
  if (policy === "compact") return "compacted: the latest record of each key is kept";
  const bounds = [bytes && size(bytes), seconds && duration(seconds)].filter(Boolean);
  return bounds.length ? `kept up to ${bounds.join(" and ")}, in whole segments` : "kept forever";
}

export const topic = {
  path: "/topics/:topic",
  title: ({ topic: name }) => name,
  crumbs: ({ topic: name }) => html`<a href="#/topics">Topics</a> / <b>${name}</b>`,
  async load({ topic: name }, query, signal) {
    const info = await get(path`/topics/${name}`, {}, signal);
    const from = query.offset !== undefined ? Number(query.offset) : Math.max(info.first_offset, info.next_offset - 50);
    const [records, minutes] = await Promise.all([
      get(
        path`/topics/${name}/consume`,
        query.time ? { at: new Date(query.time).toISOString(), max_messages: 50 } : { offset: from, max_messages: 50 },
        signal,
      ),
      loadRolledUp({ topic: name }, signal),
    ]);
    return { info, groups: info.groups, records, from, minutes };
  },
  view({ info, groups, records, from, minutes }, context) {
    const { state, query } = context;
    const list = state.tail ? state.tail.records : records.toReversed();
    return html`<h1>${info.topic} <small>${retention(info)}</small></h1>
      <div class="tools">
        ${button(context, "read_write", "produce", "Produce a record", { primary: true })}${button(context, "admin", "policy", "Policy")}
        ${button(context, "admin", "delete", "Delete", { danger: true })}
      </div>
      <div class="figures">
        ${figure("records/s", rate(info.rate), sparkline(info.history, "produced", "records per second"))}${figure("records", count(info.records))}${figure("size", size(info.bytes))}
        ${figure("offsets", html`${count(info.first_offset)} <small>to ${count(info.next_offset)}</small>`)}${figure("damaged ranges", bad(info.damage.length))}
        ${info.tier_offset === null ? "" : figure("in the tier", html`${size(info.tier_bytes)} <small>up to ${count(info.tier_offset)}, local from ${count(info.local_offset)}</small>`)}
      </div>
      <h2>Groups</h2>
      ${table({
        columns: [
          { name: "group", title: "Group", cell: (g) => g.group },
          { name: "committed", title: "Committed", number: true, card: true, cell: (g) => count(g.committed) },
          { name: "lag", title: "Lag", number: true, card: true, cell: (g) => count(g.lag) },
          { name: "behind", title: "Behind", number: true, card: true, cell: (g) => age(g.lag_seconds) },
          {
            name: "members",
            title: "Members",
            cell: (g) =>
              [...new Set(g.leases.map((lease) => lease.member))].join(", ") || html`<small>no active lease</small>`,
          },
          {
            name: "actions",
            title: "",
            kind: "actions",
            cell: (g) => button(context, "read_write", "reset", "Reset", { data: { group: g.group } }),
          },
        ],
        rows: groups,
        key: (g) => g.group,
        caption: "Groups",
        empty: teach("No group reads this topic.", `penstock topic consume ${context.params.topic} --group billing`),
      })}
      ${rolledUp(minutes)}
      <details class="segments">
        <summary>
          <h2>Segments <small>${plural(info.segments.length, "file")}</small></h2>
        </summary>
        ${table({ columns: SEGMENTS, rows: info.segments.slice(-100).toReversed(), key: (one) => one.base, caption: "Segments, the newest first", empty: "" })}
      </details>
      <h2>Records</h2>
      <div class="tools">
        <label class="beside"
          >offset <input type="number" min="0" data-choice="offset" value="${query.offset ?? from}"
        /></label>
        <label class="beside">time <input type="datetime-local" data-choice="time" value="${query.time ?? ""}" /></label
        >${filter(query, "Tail only records that contain", "contains")}
        <button data-action="tail" aria-pressed="${Boolean(state.tail)}">
          ${state.tail ? "Stop live tail" : "Live tail"}
        </button>
      </div>
      ${table({ columns: [...RECORDS, state.tail && { name: "seen", title: "Seen", number: true, cell: (r) => clock(r.seen, true) }], rows: list, key: (r) => r.offset, caption: "Records", empty: state.tail ? "Waiting for records …" : "No record here." })}`;
  },
  actions: {
    tail(_, context) {
      if (context.state.tail) context.state.tail.ending.abort();
      else tail(context);
      context.draw();
    },
    async produce(_, { params, say, refresh }) {
      const values = await form({
        title: `Produce to ${params.topic}`,
        button: "Produce",
        fields: [{ name: "payload", label: "Payload", kind: "json" }],
        check: async ({ payload: text }) => {
          try {
            const done = await ask("POST", path`/topics/${params.topic}/produce`, { body: { payload: text } });
            say(`Stored at offset ${count(done.offset ?? done.first_offset)}.`);
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) refresh();
    },
    async policy(_, { params, data, say, refresh }) {
      const values = await form({
        title: `Policy of ${params.topic}`,
        button: "Save",
        text: "delete: retention deletes old segments. compact: the latest record of each key is kept.",
        fields: [{ name: "policy", label: "Policy", choices: ["delete", "compact"], value: data.info.policy }],
        check: async (given) => {
          try {
            await ask("PUT", path`/topics/${params.topic}/policy`, { body: given });
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) {
        say("Saved.");
        refresh();
      }
    },
    async reset(element, { params, say, refresh }) {
      const { group } = element.dataset;
      const url = path`/topics/${params.topic}/groups/${group}/reset`;
      const values = await form({
        title: `Reset ${group}`,
        button: "Preview",
        fields: [
          { name: "to", label: "To", choices: ["beginning", "end", "offset", "time"], value: "beginning" },
          { name: "offset", label: "Offset", kind: "number", help: "only for “offset”" },
          { name: "time", label: "Time", kind: "datetime-local", help: "only for “time”" },
        ],
        check: ({ to, offset, time }) =>
          to === "time" && !time ? "Choose a time." : to === "offset" && !offset ? "Enter an offset." : "",
      });
      if (!values) return;
      const body = {
        offset: { offset: Number(values.offset) },
        time: { at: values.time && new Date(values.time).toISOString() },
      }[values.to] ?? { to: values.to };
      const preview = await ask("POST", url, { body: { ...body, dryRun: true } });
      const change = preview.lag - preview.lagBefore;
      const text = html`<p>
        ${group} moves from offset ${count(preview.before)} to ${count(preview.committed)}:
        ${change >= 0 ? html`${plural(change, "record")} will be read again` : html`${plural(-change, "record")} will be skipped`}.
        Its lag will be ${plural(preview.lag, "record")}.
      </p>`;
      if (
        !(await confirm({
          title: "Reset the group",
          text,
          button: change >= 0 ? `Read ${plural(change, "record")} again` : `Skip ${plural(-change, "record")}`,
          danger: change < 0,
        }))
      )
        return;
      await ask("POST", url, { body });
      say(`${group} continues at offset ${count(preview.committed)}.`);
      refresh();
    },
    async delete(_, { params, data, say, go }) {
      const text = html`<p>
        ${count(data.info.records)} records (${size(data.info.bytes)}) of ${params.topic} will be deleted.
      </p>`;
      if (!(await confirm({ title: "Delete the topic", text, button: `Delete ${params.topic}`, typed: params.topic })))
        return;
      await ask("DELETE", path`/topics/${params.topic}`);
      say(`${params.topic} was deleted.`);
      go("#/topics");
    },
  },
};
