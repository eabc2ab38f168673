/** Schedules: messages pushed at the times of a cron expression, and the results of the last runs. */
import { ask, get, path, withJson } from "../api.js";
import { html } from "../html.js";
import { inWords } from "../cron.js";
import { day, duration, moment } from "../format.js";
import { confirm, form, show } from "../components/dialog.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { badge, button, filter, since, teach } from "./common.js";

const time = (text) => new Date(text).getTime();
const until = (text) =>
  html`<time title="${moment(time(text))}">in ${duration(Math.max(0, (time(text) - Date.now()) / 1000))}</time>`;
const outcome = (run) =>
  html`<span class="${["full", "refused"].includes(run.result) ? "bad" : run.result === "skipped" ? "warn" : ""}"
    >${run.result}${run.manual ? ", run manually" : ""}</span
  >`;

const RUNS = [
  { name: "due", title: "Due", card: true, cell: (r) => moment(time(r.dueAt)) },
  { name: "result", title: "Result", card: true, cell: outcome },
  {
    name: "error",
    title: "Error",
    kind: "text",
    cell: (r) => (r.error ? html`<span class="bad">${visible(r.error)}</span>` : ""),
  },
  { name: "id", title: "Transaction id", cell: (r) => html`<code>${r.transactionId}</code>` },
];

const SHOWN_TIMES = 5;

/** The next times: the first as a duration, the others on request. */
function next(s) {
  if (!s.nextRuns.length) return "–";
  const times = s.nextRuns.slice(0, SHOWN_TIMES);
  return html`<details>
    <summary>${until(times[0])}</summary>
    <ol class="times-list" aria-label="Next times of ${s.name}">
      ${times.map((at) => html`<li><time title="${moment(time(at))}">${day(time(at))}</time></li>`)}
    </ol>
  </details>`;
}

const columns = (context) => [
  {
    name: "name",
    title: "Schedule",
    card: true,
    cell: (s) => html`<b>${s.name}</b><br />${inWords(s.cron)} <small><code>${s.cron}</code> ${s.timezone}</small>`,
  },
  {
    name: "queue",
    title: "Queue",
    cell: (s) => html`<a href="#/queues/${encodeURIComponent(s.queue)}">${s.queue}</a>`,
  },
  { name: "state", title: "State", card: true, cell: (s) => badge(s.paused ? "paused" : "active") },
  { name: "next", title: "Next", number: true, card: true, cell: next },
  {
    name: "last",
    title: "Last",
    number: true,
    cell: (s) =>
      s.lastRuns.length ? html`${since(time(s.lastRuns[0].dueAt))}<br /><small>${outcome(s.lastRuns[0])}</small>` : "–",
  },
  {
    name: "actions",
    title: "",
    kind: "actions",
    cell: (s) =>
      html`<button data-action="runs" data-name="${s.name}">Runs</button>
        ${button(context, "read_write", "run", "Run now", { data: { name: s.name } })}
        ${button(context, "read_write", s.paused ? "resume" : "pause", s.paused ? "Resume" : "Pause", { data: { name: s.name } })}
        ${button(context, "admin", "delete", "Delete", { danger: true, data: { name: s.name } })}`,
  },
];

const act =
  (action, done) =>
  async (element, { say, refresh }) => {
    const { name } = element.dataset;
    say(done(name, await ask("POST", `${path`/api/v1/schedules/${name}`}/${action}`)));
    refresh();
  };

export const schedules = {
  path: "/schedules",
  title: () => "Schedules",
  load: (_, __, signal) => get("/api/v1/schedules", {}, signal),
  view(data, context) {
    const words = (context.query.filter ?? "").toLowerCase();
    const rows = data.schedules.filter((s) => `${s.name} ${s.queue}`.toLowerCase().includes(words));
    return html`<h1>Schedules</h1>
      <div class="tools">
        ${filter(context.query, "Filter by name or queue")}
        ${button(context, "read_write", "create", "Create a schedule", { primary: true })}
      </div>
      ${table({
        columns: columns(context),
        rows,
        key: (s) => s.name,
        caption: "Schedules",
        empty: words
          ? "No schedule matches."
          : teach(
              "There is no schedule yet. A schedule pushes a message at the times of a cron expression.",
              "penstock schedule create nightly --cron '0 3 * * *' --tz Europe/Rome --queue reports --payload '{}'",
            ),
      })}`;
  },
  actions: {
    run: act("run", (name, run) => `${name}: ${run.result}.`),
    pause: act("pause", (name) => `${name} is paused.`),
    resume: act("resume", (name) => `${name} was resumed.`),
    async runs(element, { data }) {
      const schedule = data.schedules.find((s) => s.name === element.dataset.name);
      await show({
        title: schedule.name,
        content: html`<h3>Next</h3>
          <ul>
            ${schedule.nextRuns.map((at) => html`<li>${moment(time(at))}</li>`)}
          </ul>
          <h3>Last</h3>
          ${table({
            columns: RUNS,
            rows: schedule.lastRuns,
            key: (r) => r.transactionId + r.result,
            caption: "Last runs",
            empty: "No run yet.",
          })}`,
      });
    },
    async create(_, { say, refresh }) {
      const fields = [
        { name: "name", label: "Name" },
        { name: "cron", label: "Cron", value: "0 3 * * *", help: "minute, hour, day of month, month, day of week" },
        { name: "timezone", label: "Time zone", value: Intl.DateTimeFormat().resolvedOptions().timeZone ?? "UTC" },
        { name: "queue", label: "Queue" },
        { name: "partition", label: "Partition", value: "Default" },
        { name: "payload", label: "Payload (JSON)", kind: "json", value: "{}" },
        {
          name: "catchUp",
          label: "Missed times",
          value: "one",
          choices: ["none", "one", "all"],
          help: "messages to push for times that passed while no broker was running",
        },
      ];
      const check = async ({ name, payload, ...rest }) => {
        if (!name) return "A schedule needs a name.";
        try {
          await ask("PUT", path`/api/v1/schedules/${name}`, { body: withJson(rest, "payload", payload) });
        } catch (error) {
          return error.message;
        }
        return "";
      };
      const values = await form({ title: "Create a schedule", button: "Create", fields, check });
      if (!values) return;
      say(`${values.name} was created.`);
      refresh();
    },
    async delete(element, { say, refresh }) {
      const { name } = element.dataset;
      if (
        !(await confirm({
          title: "Delete the schedule",
          text: html`<p>${name} will push no more messages. Messages it has pushed are kept.</p>`,
          button: `Delete ${name}`,
          typed: name,
        }))
      )
        return;
      await ask("DELETE", path`/api/v1/schedules/${name}`);
      say(`${name} was deleted.`);
      refresh();
    },
  },
};
