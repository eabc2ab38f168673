/** Routes: their state, queued records and errors. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, duration, moment, plural, rate, size } from "../format.js";
import { confirm, form } from "../components/dialog.js";
import { payload, visible } from "../components/json.js";
import { table } from "../components/table.js";
import { age, bad, badge, button, figure, filter, pairs, teach } from "./common.js";

const linkTo = (route) => `#/routes/${encodeURIComponent(route)}`;
const source = (r) =>
  !r.source
    ? "could not start"
    : typeof r.source === "string"
      ? r.source
      : r.source.topic
        ? `topic ${r.source.topic}`
        : `queue ${r.source.queue}@${r.source.group}`;
/** The broker says -1 for "never, at this rate". */
const eta = (seconds) => (seconds === null || seconds === undefined || seconds < 0 ? "–" : duration(seconds));
const problem = (r) => r.lastError ?? (r.triesAgainSeconds === null ? null : r.paused) ?? r.sourceError;
const OUTCOMES = {
  accepted: "accepted",
  delivered: "delivered",
  deadLettered: "dead letters",
  dropped: "dropped",
  queued: "waiting",
};
/** The state of a running route whose breaker is open or half-open. */
const BROKEN = { open: "failing", half_open: "probing" };

/** Return the state of a route: one that cannot send is not shown as running. */
function state(r) {
  if (r.triesAgainSeconds !== null && r.paused) return badge("denied");
  return badge((r.state === "running" && BROKEN[r.breaker?.state]) || r.state);
}

const ROUTES = [
  {
    name: "name",
    title: "Route",
    card: true,
    cell: (r) => html`<a href="${linkTo(r.name)}">${r.name}</a><br /><small>${source(r)}</small>`,
  },
  { name: "state", title: "State", card: true, cell: state },
  { name: "breaker", title: "Breaker", cell: (r) => badge(r.breaker?.state) },
  {
    name: "backlog",
    title: "Waiting",
    number: true,
    card: true,
    cell: (r) => count((r.queue?.records ?? 0) + (r.lag ?? 0)),
  },
  { name: "age", title: "Oldest", number: true, cell: (r) => (r.queue?.records ? age(r.queue.oldestAgeSeconds) : "–") },
  { name: "rate", title: "Batches/s", number: true, cell: (r) => rate(r.queue?.batchesOutPerSecond) },
  { name: "full", title: "Full in", number: true, cell: (r) => eta(r.queue?.timeToFullSeconds) },
  { name: "dead", title: "Dead letters", number: true, cell: (r) => bad(r.deadLetters) },
  {
    name: "error",
    title: "Last error",
    kind: "text",
    cell: (r) => (problem(r) ? html`<span class="bad">${visible(String(problem(r)))}</span>` : ""),
  },
];

export const routes = {
  path: "/routes",
  title: () => "Routes",
  load: (_, __, signal) => get("/api/v1/routes", {}, signal),
  view(data, context) {
    const words = (context.query.filter ?? "").toLowerCase();
    const rows = data.routes.filter((route) => route.name.toLowerCase().includes(words));
    return html`<h1>Routes</h1>
      <div class="tools">
        ${filter(context.query, "Filter by name")}${button(context, "admin", "create", "Create a route", { primary: true })}
      </div>
      ${table({
        columns: ROUTES,
        rows,
        key: (r) => r.name,
        href: (r) => linkTo(r.name),
        caption: "Routes",
        empty: words
          ? "No route matches."
          : teach(
              "There is no route yet. A route sends the records of a topic or a queue to another system.",
              `curl -X POST ${location.origin}/api/v1/routes -H 'Content-Type: application/json' -d '${JSON.stringify({
                name: "lake",
                source: { topic: "orders" },
                destination: { type: "http", url: "https://example.com/in" },
              })}'`,
            ),
      })}`;
  },
  actions: {
    async create(_, context) {
      const example = {
        name: "lake",
        source: { topic: "orders" },
        destination: { type: "http", url: "https://example.com/in" },
      };
      const values = await form({
        title: "Create a route",
        button: "Create",
        fields: [
          {
            name: "definition",
            label: "Definition (JSON)",
            kind: "json",
            value: JSON.stringify(example, null, 2),
            help: "source, destination, batch and queue, as in the configuration file",
          },
        ],
        check: async ({ definition }) => {
          try {
            await ask("POST", "/api/v1/routes", { body: JSON.parse(definition) });
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) context.refresh();
    },
  },
};

const LETTERS = [
  {
    name: "reason",
    title: "Reason",
    kind: "text",
    card: true,
    cell: (l) => html`<span class="bad">${visible(l.reason)}</span>`,
  },
  { name: "detail", title: "Detail", kind: "text", card: true, cell: (l) => visible(l.detail) },
  { name: "attempts", title: "Attempts", number: true, cell: (l) => count(l.attempts) },
  {
    name: "record",
    title: "Record",
    cell: (l) =>
      html`<details>
        <summary class="mono">${visible(l.record.slice(0, 100))}</summary>
        ${payload(l.record, "json")}
      </details>`,
  },
];

const act =
  (action, done) =>
  async (_, { params, say, refresh }) => {
    const result = await ask("POST", path`/api/v1/routes/${params.route}/${action}`);
    say(done(result ?? {}));
    refresh();
  };

/** Show whether the records of all outcomes add up to the accepted ones. */
function balance({ accepted, delivered, deadLettered, dropped, queued }) {
  const known = delivered + deadLettered + queued + Object.values(dropped).reduce((sum, n) => sum + n, 0);
  return known === accepted
    ? html`<p class="good">✓ all accounted for</p>`
    : html`<p class="bad">✗ the figures do not add up</p>`;
}

export const route = {
  path: "/routes/:route",
  title: ({ route: name }) => name,
  crumbs: ({ route: name }) => html`<a href="#/routes">Routes</a> / <b>${name}</b>`,
  async load({ route: name }, _, signal) {
    const one = await get(path`/api/v1/routes/${name}`, {}, signal);
    const letters = one.deadLetters
      ? (await get(path`/api/v1/routes/${name}/deadletters`, { limit: 20 }, signal)).letters
      : [];
    return { ...one, letters };
  },
  view(data, context) {
    const { queue, workers } = data;
    const waiting = (queue.records ?? 0) + (data.lag ?? 0);
    return html`<h1>
        ${data.name} ${state(data)}
        <small
          >${source(data)} →
          ${typeof data.destination === "object" ? Object.values(data.destination).join(" ") : data.destination}</small
        >
      </h1>
      <div class="tools">
        ${data.paused ? button(context, "admin", "resume", "Resume", { primary: true }) : button(context, "admin", "pause", "Pause")}
        ${button(context, "admin", "drain", "Drain")}${
          data.deadLetters
            ? button(context, "admin", "replay", `Replay ${plural(data.deadLetters, "dead letter")}`)
            : ""
        }
        ${button(context, "admin", "purge", "Purge", { danger: true })}${button(context, "admin", "delete", "Delete", { danger: true })}
      </div>
      ${
        problem(data)
          ? html`<p class="problem">
              ${visible(String(problem(data)))}${
                data.failingSince
                  ? html` <small title="since ${moment(data.failingSince * 1000)}"
                      >for ${duration(Date.now() / 1000 - data.failingSince)}</small
                    >`
                  : ""
              }${data.triesAgainSeconds === null ? "" : html` <small>next attempt in ${duration(data.triesAgainSeconds)}</small>`}
            </p>`
          : ""
      }
      <div class="figures">
        ${figure("waiting records", count(waiting))}
        ${figure("oldest", queue.records ? age(queue.oldestAgeSeconds) : "–")}
        ${figure("batches/s out", rate(queue.batchesOutPerSecond))} ${figure("drained in", eta(queue.drainEtaSeconds))}
        ${figure("full in", eta(queue.timeToFullSeconds))}${figure("dead letters", bad(data.deadLetters))}
      </div>
      <div class="cards">
        <div class="card">
          <h2>Records by outcome</h2>
          ${pairs(
            Object.entries(queue.accounting ?? {}).map(([name, value]) => [
              OUTCOMES[name] ?? name,
              typeof value === "object"
                ? Object.entries(value)
                    .map(([why, n]) => `${why} ${count(n)}`)
                    .join(", ") || "0"
                : count(value),
            ]),
          )}${balance(queue.accounting)}
        </div>
        <div class="card">
          <h2>Sending</h2>
          ${pairs([
            ["breaker", html`${badge(data.breaker.state)} <small>${plural(data.breaker.failures, "failure")}</small>`],
            ["backoff", duration(data.backoffSeconds)],
            ["workers", `${count(workers.active)} of ${count(workers.total)} active`],
            ["in flight", count(workers.inflight)],
            ["latency", duration(workers.latencySeconds)],
            ["on disk", size(queue.diskBytes)],
            ["source lag", data.lag === null ? "–" : plural(data.lag, "record")],
          ])}
        </div>
      </div>
      ${
        data.letters.length
          ? html`<h2>Dead letters</h2>
              ${table({ columns: LETTERS, rows: data.letters, key: (l) => `${l.sequence}.${l.index}`, caption: "Dead letters" })}`
          : ""
      }`;
  },
  actions: {
    pause: act("pause", () => "Paused."),
    resume: act("resume", () => "Resumed."),
    async drain(_, context) {
      const text = html`<p>
        ${context.params.route} sends its ${count(context.data.queue.records)} queued records and accepts no new ones
        from ${source(context.data)} until it is resumed.
      </p>`;
      if (await confirm({ title: "Drain the route", text, button: "Drain", danger: false }))
        await act("drain", () => "Draining: queued records are sent, new ones are not accepted.")(null, context);
    },
    async replay(_, context) {
      const text = html`<p>
        ${plural(context.data.deadLetters, "record")} will be sent to the destination of ${context.params.route} again.
      </p>`;
      if (
        await confirm({
          title: "Replay dead letters",
          text,
          button: `Replay ${plural(context.data.deadLetters, "record")}`,
          danger: false,
        })
      )
        await act("replay", ({ records }) => `${plural(records ?? 0, "dead letter")} queued again.`)(null, context);
    },
    async purge(_, { params, data, say, refresh }) {
      const text = html`<p>
        ${plural(data.queue.records, "record")} in the send queue of ${params.route} will be dropped and never sent.
      </p>`;
      if (
        !(await confirm({
          title: "Purge the route",
          text,
          button: `Drop ${plural(data.queue.records, "record")}`,
          typed: params.route,
        }))
      )
        return;
      const done = await ask("POST", path`/api/v1/routes/${params.route}/purge`);
      say(`${plural(done?.records ?? 0, "record")} dropped.`);
      refresh();
    },
    async delete(_, { params, data, say, go }) {
      const text = html`<p>
        The route ${params.route} will be deleted. Drain or purge its ${plural(data.queue.records, "queued record")}
        first.
      </p>`;
      if (!(await confirm({ title: "Delete the route", text, button: `Delete ${params.route}`, typed: params.route })))
        return;
      await ask("DELETE", path`/api/v1/routes/${params.route}`);
      say(`${params.route} was deleted.`);
      go("#/routes");
    },
  },
};
