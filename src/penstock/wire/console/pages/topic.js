/** One topic: its partitions, groups, segments, records and actions. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, duration, plural, rate, size } from "../format.js";
import { sparkline } from "../components/chart.js";
import { confirm, form } from "../components/dialog.js";
import { table } from "../components/table.js";
import { age, bad, button, figure, since, teach } from "./common.js";
import { loadRolledUp, rolledUp } from "./history.js";
import { loadRecords, records, tail } from "./records.js";

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
      html`<span class="badge">${one.sealed ? "sealed" : "being written"}</span>
        ${one.compacted ? html`<span class="badge">compacted</span>` : ""}
        ${one.local ? "" : html`<span class="badge">in the tier only</span>`}`,
  },
];

const partitionColumns = (context) => [
  {
    name: "partition",
    title: "Partition",
    card: true,
    cell: (p) =>
      html`<a href="${context.withQuery({ partition: p.partition, offset: "", time: "" })}">${p.partition}</a>`,
  },
  { name: "records", title: "Records", number: true, card: true, cell: (p) => count(p.records) },
  { name: "bytes", title: "Size", number: true, cell: (p) => size(p.bytes) },
  { name: "first", title: "First offset", number: true, cell: (p) => count(p.first_offset) },
  { name: "next", title: "Next offset", number: true, card: true, cell: (p) => count(p.next_offset) },
];

const PLACEMENT = [
  { name: "partition", title: "Partition", card: true, cell: (p) => p.partition },
  {
    name: "headRows",
    title: "Batches in PostgreSQL",
    number: true,
    card: true,
    cell: (p) => count(p.shared.head_rows),
  },
  { name: "headBytes", title: "Size there", number: true, cell: (p) => size(p.shared.head_bytes) },
  {
    name: "ranges",
    title: "Ranges in object storage",
    number: true,
    card: true,
    cell: (p) => count(p.shared.tiered_ranges),
  },
  { name: "tieredBytes", title: "Size there", number: true, cell: (p) => size(p.shared.tiered_bytes) },
  { name: "until", title: "Moved up to", number: true, cell: (p) => count(p.shared.tiered_until ?? p.first_offset) },
];

/** Where the records of a shared topic are, and whether old ones are moved on schedule. */
function placement(partitions) {
  const late = partitions.map((p) => p.shared.mover_lag);
  const text = late.includes(null)
    ? "there is no object store (topics.shared_tier), so all records stay in PostgreSQL"
    : Math.max(...late) > 0
      ? `the mover is ${duration(Math.max(...late))} late`
      : "old records move to object storage on schedule";
  return html`<h2>Where the records are <small>${text}</small></h2>
    ${table({ columns: PLACEMENT, rows: partitions, key: (p) => p.partition, caption: "Where the records are" })}`;
}

/** Describe the retention of the topic. */
function retention({ policy, placement, retention: { bytes, age: seconds } }) {
  if (policy === "compact") return "compacted: the latest record of each key is kept";
  const bounds = [bytes && size(bytes), seconds && duration(seconds)].filter(Boolean);
  return bounds.length
    ? `kept up to ${bounds.join(" and ")}, in whole ${placement === "shared" ? "batches" : "segments"}`
    : "kept forever";
}

/** The members of a group: Kafka clients with their partitions, or holders of leases. */
function members(group) {
  if (group.members.length) {
    return group.members.map(
      (one) =>
        html`<div>
          ${one.client || one.member} <small>${one.host}</small>
          <span class="badge"
            >${one.partitions.length === 1 ? "partition" : "partitions"} ${one.partitions.join(", ")}</span
          >
        </div>`,
    );
  }
  const leasing = [...new Set(group.leases.map((lease) => lease.member))];
  return leasing.length ? leasing.join(", ") : html`<small>no active member</small>`;
}

/** The committed offset, per partition if there are several. */
const committed = (group) =>
  group.partitions.length === 1
    ? count(group.partitions[0].committed)
    : html`<details>
        <summary>${plural(group.partitions.length, "partition")}</summary>
        ${group.partitions.map(
          (one) => html`<div>${one.partition}: ${count(one.committed)} <small>lag ${count(one.lag)}</small></div>`,
        )}
      </details>`;

const groupColumns = (context) => [
  { name: "group", title: "Group", cell: (g) => html`<b>${g.group}</b>` },
  { name: "committed", title: "Committed", number: true, card: true, cell: committed },
  { name: "lag", title: "Lag", number: true, card: true, cell: (g) => count(g.lag) },
  {
    name: "behind",
    title: "Behind",
    number: true,
    card: true,
    cell: (g) => age(Math.max(...g.partitions.map((one) => one.lag_seconds ?? 0))),
  },
  { name: "members", title: "Members", kind: "text", cell: members },
  {
    name: "metadata",
    title: "Metadata",
    kind: "text",
    cell: (g) => [...new Set(g.partitions.map((one) => one.metadata).filter(Boolean))].join(", "),
  },
  {
    name: "actions",
    title: "",
    kind: "actions",
    cell: (g) =>
      g.partitions.length > 1 ? "" : button(context, "read_write", "reset", "Reset", { data: { group: g.group } }),
  },
];

function view({ info, parts, page, minutes }, context) {
  const several = parts.partitions.length > 1;
  const shared = info.placement === "shared";
  const metadata = parts.groups.some((g) => g.partitions.some((one) => one.metadata));
  return html`<h1>
      ${info.topic} ${shared ? html`<span class="badge">shared</span>` : ""}
      <small
        >${retention(info)}; ${parts.format}
        format${several ? `, ${plural(parts.partitions.length, "partition")}` : ""}</small
      >
    </h1>
    <div class="tools">
      ${button(context, "read_write", "produce", "Produce a record", { primary: true })}
      ${button(context, "admin", "policy", "Policy")} ${button(context, "admin", "delete", "Delete", { danger: true })}
    </div>
    <div class="figures">
      ${figure("records/s", rate(info.rate), sparkline(info.history, "produced", "records per second"))}
      ${figure("records", count(parts.partitions.reduce((sum, one) => sum + one.records, 0)))}
      ${figure("size", size(parts.partitions.reduce((sum, one) => sum + one.bytes, 0)))}
      ${several ? "" : figure("offsets", html`${count(info.first_offset)} <small>to ${count(info.next_offset)}</small>`)}
      ${figure("damaged ranges", bad(info.damage.length))}
      ${
        info.tier_offset === null
          ? ""
          : figure(
              "in the tier",
              html`${size(info.tier_bytes)}
                <small>up to ${count(info.tier_offset)}, local from ${count(info.local_offset)}</small>`,
            )
      }
    </div>
    <h2>Groups</h2>
    ${table({
      columns: groupColumns(context).filter((column) => column.name !== "metadata" || metadata),
      rows: parts.groups,
      key: (g) => g.group,
      caption: "Groups",
      empty: teach("No group reads this topic.", `penstock topic consume ${context.params.topic} --group billing`),
    })}
    ${
      several
        ? html`<h2>Partitions</h2>
            ${table({
              columns: partitionColumns(context),
              rows: parts.partitions,
              key: (p) => p.partition,
              caption: "Partitions",
            })}`
        : ""
    }
    ${rolledUp(minutes)}
    ${
      shared
        ? placement(parts.partitions)
        : html`<details class="segments">
            <summary>
              <h2>
                Segments <small>${plural(info.segments.length, "file")}${several ? " of partition 0" : ""}</small>
              </h2>
            </summary>
            ${table({
              columns: SEGMENTS,
              rows: info.segments.slice(-100).toReversed(),
              key: (one) => one.base,
              caption: "Segments, the newest first",
              empty: "",
            })}
          </details>`
    }
    ${records(page, parts.partitions, context)}`;
}

const actions = {
  tail(_, context) {
    if (context.state.tail) context.state.tail.ending.abort();
    else tail(context);
    context.draw();
  },
  async produce(_, { params, query, data, say, refresh }) {
    const keyed = data.parts.format === "kafka";
    const fields = [
      keyed && { name: "key", label: "Key" },
      { name: "payload", label: "Payload", kind: "json" },
      keyed && { name: "headers", label: "Headers (JSON)", value: "{}", help: "an object of strings" },
    ].filter(Boolean);
    const values = await form({
      title: `Produce to ${params.topic}`,
      button: "Produce",
      fields,
      check: async ({ payload, key, headers }) => {
        try {
          const body = { payload };
          if (key) body.key = key;
          if (headers) body.headers = Object.entries(JSON.parse(headers));
          const asked = { query: { partition: query.partition }, body };
          const done = await ask("POST", path`/topics/${params.topic}/produce`, asked);
          say(`Stored at offset ${count(done.offset)}.`);
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
    const places = {
      offset: { offset: Number(values.offset) },
      time: { at: values.time && new Date(values.time).toISOString() },
    };
    const body = places[values.to] ?? { to: values.to };
    const preview = await ask("POST", url, { body: { ...body, dryRun: true } });
    const change = preview.lag - preview.lagBefore;
    const records = plural(Math.abs(change), "record");
    const text = html`<p>
      ${group} moves from offset ${count(preview.before)} to ${count(preview.committed)}: ${records} will be
      ${change >= 0 ? "read again" : "skipped"}. Its lag will be ${plural(preview.lag, "record")}.
    </p>`;
    const label = change >= 0 ? `Read ${records} again` : `Skip ${records}`;
    if (!(await confirm({ title: "Reset the group", text, button: label, danger: change < 0 }))) return;
    await ask("POST", url, { body });
    say(`${group} continues at offset ${count(preview.committed)}.`);
    refresh();
  },
  async delete(_, { params, data, say, go }) {
    const text = html`<p>
      ${count(data.info.records)} records (${size(data.info.bytes)}) of ${params.topic} will be deleted.
    </p>`;
    const label = `Delete ${params.topic}`;
    if (!(await confirm({ title: "Delete the topic", text, button: label, typed: params.topic }))) return;
    await ask("DELETE", path`/topics/${params.topic}`);
    say(`${params.topic} was deleted.`);
    go("#/topics");
  },
};

export const topic = {
  path: "/topics/:topic",
  title: ({ topic: name }) => name,
  crumbs: ({ topic: name }) => html`<a href="#/topics">Topics</a> / <b>${name}</b>`,
  async load({ topic: name }, query, signal) {
    const [info, parts, page, minutes] = await Promise.all([
      get(path`/topics/${name}`, {}, signal),
      get(path`/api/v1/topics/${name}/partitions`, {}, signal),
      loadRecords(name, query, signal),
      loadRolledUp({ topic: name }, signal),
    ]);
    return { info, parts, page, minutes };
  },
  view,
  actions,
};
