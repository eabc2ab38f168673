/** Buffers: events that wait in files. */
import { ask, get } from "../api.js";
import { html } from "../html.js";
import { count, duration, plural, rate, size } from "../format.js";
import { confirm } from "../components/dialog.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { age, bad, badge, button, figure } from "./common.js";

const kindName = (kind) => (kind === "qos0" ? "QoS 0" : "Failover");
const MODES = {
  direct: "Pushes go to PostgreSQL.",
  failover: "PostgreSQL is down: pushes go to files and are replayed, in order, when it is back.",
  maintenance: "Maintenance mode: pushes go to files until it is switched off.",
};

const KINDS = [
  { name: "kind", title: "Kind", card: true, cell: (k) => kindName(k.kind) },
  { name: "pending", title: "Waiting", number: true, card: true, cell: (k) => count(k.pending) },
  { name: "files", title: "Files", number: true, cell: (k) => count(k.files) },
  { name: "bytes", title: "Size", number: true, cell: (k) => size(k.bytes) },
  { name: "age", title: "Oldest", number: true, cell: (k) => (k.files ? age(k.oldestAge) : "–") },
  { name: "flushed", title: "Committed", number: true, cell: (k) => count(k.flushed) },
];

const FILES = [
  { name: "name", title: "File", cell: (f) => html`<code>${f.name}</code>` },
  { name: "kind", title: "Kind", cell: (f) => kindName(f.kind) },
  { name: "state", title: "State", card: true, cell: (f) => badge(f.state) },
  { name: "events", title: "Events", number: true, card: true, cell: (f) => count(f.events) },
  { name: "bytes", title: "Size", number: true, cell: (f) => size(f.bytes) },
  { name: "age", title: "Age", number: true, card: true, cell: (f) => age(f.age) },
  {
    name: "reason",
    title: "Reason",
    kind: "text",
    cell: (f) => (f.reason ? html`<span class="bad">${visible(f.reason)}</span>` : ""),
  },
];

export const buffers = {
  path: "/buffers",
  title: () => "Buffers",
  load: (_, __, signal) => get("/api/v1/status/buffers", {}, signal),
  view(data, context) {
    const mode = data.maintenanceMode ? "maintenance" : data.dbHealthy ? "direct" : "failover";
    return html`<h1>Buffers ${badge(mode)} <small>${MODES[mode]}</small></h1>
      <div class="tools">
        ${button(
          context,
          "admin",
          "maintenance",
          data.maintenanceMode ? "Switch maintenance off" : "Switch maintenance on",
          { data: { on: !data.maintenanceMode } },
        )}
        ${data.failed ? button(context, "admin", "retry", `Retry ${plural(data.failed, "failed event")}`) : ""}
      </div>
      <div class="figures">
        ${figure("waiting events", count(data.pending))}${figure("replayed in", data.pending ? duration(data.drainSeconds) : "–")}
        ${figure("replay", `${rate(data.replayRate)}/s`)}
        ${figure("failed", bad(data.failed))}${figure("in quarantine", bad(data.quarantined))}
      </div>
      ${table({
        columns: KINDS,
        rows: ["failover", "qos0"].map((kind) => ({ kind, ...data[kind] })),
        key: (k) => k.kind,
        caption: "Buffers by kind",
        empty: "",
      })}
      <h2>Files</h2>
      ${table({
        columns: FILES,
        rows: data.files,
        key: (f) => f.name,
        caption: "Buffer files",
        empty: html`<p>No buffered events. Files appear while PostgreSQL is down, and for pushes with QoS 0.</p>`,
      })}`;
  },
  actions: {
    async maintenance(element, { data, say, refresh }) {
      const on = element.dataset.on === "true";
      const text = on
        ? "Pushes of all brokers go to files on disk until you switch it off; pops still deliver stored messages."
        : `${plural(data.pending, "event")} are replayed into PostgreSQL, in order.`;
      if (
        !(await confirm({
          title: on ? "Maintenance on" : "Maintenance off",
          text,
          button: on ? "Send pushes to the buffer" : "Replay the buffer",
          danger: on,
        }))
      )
        return;
      await ask("PUT", "/api/v1/buffers/maintenance", { body: { push: on } });
      say(on ? "Pushes go to the buffer." : "The buffer is being replayed.");
      refresh();
    },
    async retry(_, { say, refresh }) {
      const done = await ask("POST", "/api/v1/buffers/retry-failed");
      say(`${plural(done.failed, "failed event")} left.`);
      refresh();
    },
  },
};
