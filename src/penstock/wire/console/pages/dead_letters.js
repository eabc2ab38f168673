/**
 * Dead letters grouped by error, with counts over time, and the newest of them one by one. The filter is
 * in the address (queue, group, error). The broker requeues or purges everything that matches it. Single
 * letters can be selected, shown in full, and edited.
 */
import { ask, bytes, get, path, withJson } from "../api.js";
import { html } from "../html.js";
import { ago, count, plural } from "../format.js";
import { bars, sparkline } from "../components/chart.js";
import { confirm, form, show } from "../components/dialog.js";
import { payload, preview, textOf, visible } from "../components/json.js";
import { table } from "../components/table.js";
import { QUEUE_MODE, button, filter, groupName, since, teach } from "./common.js";
import { cancelTask, loadTasks, tasks } from "./tasks.js";

const LISTED = 50;
const place = (row) => `${row.queue}@${groupName(row.group)}`;
const linkTo = (row) =>
  `#/dead-letters?${new URLSearchParams({ queue: row.queue, group: row.group || QUEUE_MODE, filter: row.error })}`;

const COLUMNS = [
  {
    name: "error",
    title: "Error",
    kind: "text",
    card: true,
    cell: (row) => html`<span class="bad">${visible(row.error)}</span>`,
  },
  { name: "count", title: "Count", number: true, card: true, cell: (row) => count(row.count) },
  {
    name: "history",
    title: "Over time",
    cell: (row) => sparkline(row.history, "dead letters", `${row.error} over time`),
  },
  {
    name: "where",
    title: "Where",
    kind: "whole",
    cell: (row) => html`<a href="#/queues/${encodeURIComponent(row.queue)}">${row.queue}</a>@${groupName(row.group)}`,
  },
  { name: "last", title: "Last", number: true, cell: (row) => since(row.last) },
  { name: "first", title: "First", number: true, cell: (row) => since(row.first) },
];

const chosenOf = (state) => {
  state.chosen ??= new Set();
  return state.chosen;
};

const letters = (context, shown) => [
  {
    name: "chosen",
    title: "",
    label: html`<input
      type="checkbox"
      data-action="choose-all"
      aria-label="Select all listed"
      .checked="${shown.length > 0 && shown.every((m) => chosenOf(context.state).has(m.number))}"
    />`,
    kind: "check",
    cell: (m) =>
      html`<input
        type="checkbox"
        data-action="choose"
        data-id="${m.number}"
        aria-label="Select ${m.transactionId}"
        .checked="${chosenOf(context.state).has(m.number)}"
      />`,
  },
  { name: "failedAt", title: "Failed", card: true, cell: (m) => since(m.failedAt) },
  {
    name: "message",
    title: "Message",
    kind: "text",
    card: true,
    cell: (m) =>
      html`<a href="#/messages/${encodeURIComponent(m.partitionId)}/${encodeURIComponent(m.transactionId)}"
          >${m.queue} / ${m.partition}</a
        ><br /><small class="mono">${m.transactionId}</small>`,
  },
  { name: "attempts", title: "Attempts", number: true, cell: (m) => count(m.attempts) },
  {
    name: "error",
    title: "Error",
    kind: "text",
    card: true,
    cell: (m) => html`<span class="bad">${visible(m.error)}</span>`,
  },
  {
    name: "payload",
    title: "Payload",
    kind: "preview",
    cell: (m) =>
      html`<button class="plain link mono" data-action="whole" data-id="${m.number}" title="Show the whole payload">
        ${preview(m.preview, 80)}
      </button>`,
  },
  {
    name: "actions",
    title: "",
    kind: "actions",
    cell: (m) =>
      html`${button(context, "read_write", "edit", "Edit …", { data: { id: m.number } })}
      ${button(context, "read_write", "requeue-one", "Requeue", {
        data: { id: m.number, to: `${m.queue} / ${m.partition}`, group: m.group ?? "" },
      })}`,
  },
];

const which = ({ queue, group, filter: error }) => ({ queue, consumerGroup: group, error });
const inWords = ({ queue, group, filter: error }) =>
  [
    queue ? `of ${queue}${group ? `@${groupName(group)}` : ""}` : "of all queues",
    error ? `whose error contains “${error}”` : "",
  ]
    .filter(Boolean)
    .join(" ");

/** Count the messages per destination, for the confirmation. */
function destinations(data) {
  const rows = new Map();
  for (const row of data.errors) rows.set(place(row), (rows.get(place(row)) ?? 0) + row.count);
  return [...rows].map(([label, value]) => ({ label, value }));
}

/** Buttons for the selected letters, or for all that match. */
function tools(data, context) {
  const chosen = data.letters.filter((m) => chosenOf(context.state).has(m.number)).length;
  if (chosen) {
    return html`${button(context, "read_write", "requeue-chosen", `Requeue ${count(chosen)} selected`, { primary: true })}
      ${button(context, "admin", "delete-chosen", `Delete ${count(chosen)} selected`, { danger: true })}
      <button data-action="choose-none">Clear selection</button>`;
  }
  if (!data.total) return "";
  return html`${button(context, "read_write", "requeue", `Requeue all ${count(data.total)}`, { primary: true })}
  ${button(context, "admin", "purge", `Purge all ${count(data.total)}`, { danger: true })}`;
}

function view(data, context) {
  const { query } = context;
  const narrow = query.filter || query.queue || query.group;
  const words = (name) => data.errors.map((row) => row[name]);
  return html`<h1>Dead letters <small>${plural(data.total, "message")}${narrow ? " that match" : ""}</small></h1>
    ${tasks(data.tasks, context)}
    <div class="tools">
      ${filter(query, "Filter by error")}${filter(query, "Queue", "queue", words("queue"))}
      ${filter(query, "Group", "group", words("group"))} ${tools(data, context)}
      ${narrow ? html`<a href="#/dead-letters">show all</a>` : ""}
    </div>
    ${table({
      columns: COLUMNS,
      rows: data.errors,
      key: (row) => `${row.queue}/${row.group}/${row.error}`,
      caption: "Dead letters by error",
      href: linkTo,
      empty: narrow
        ? "No dead letter matches."
        : teach("No message has failed for good. When one does, it is listed here and by", "penstock queue dlq list"),
    })}
    ${
      data.letters.length
        ? html`<h2>
              ${
                data.total > data.letters.length
                  ? html`Newest <small>${count(data.letters.length)} of ${count(data.total)}</small>`
                  : "One by one"
              }
            </h2>
            ${table({
              columns: letters(context, data.letters),
              rows: data.letters,
              key: (m) => m.number,
              caption: "The newest dead letters that match",
            })}`
        : ""
    }`;
}

/** The selected letters that are listed. */
const chosenLetters = ({ data, state }) => data.letters.filter((m) => chosenOf(state).has(m.number));

async function actOnChosen(action, context) {
  const ids = chosenLetters(context).map((m) => m.number);
  const done = await ask("POST", `/api/v1/dlq/chosen/${action}`, { body: { ids } });
  chosenOf(context.state).clear();
  context.refresh();
  return { ...done, asked: ids.length };
}

const actions = {
  "cancel-task": cancelTask,
  choose({ dataset, checked }, { state, draw }) {
    if (checked) chosenOf(state).add(Number(dataset.id));
    else chosenOf(state).delete(Number(dataset.id));
    draw();
  },
  "choose-all"({ checked }, { data, state, draw }) {
    state.chosen = new Set(checked ? data.letters.map((m) => m.number) : []);
    draw();
  },
  "choose-none"(_, { state, draw }) {
    chosenOf(state).clear();
    draw();
  },
  async whole({ dataset }) {
    const body = await bytes(path`/api/v1/dlq/${dataset.id}/payload`);
    const content = html`${payload(body)}
      <p><button type="button" data-action="copy" data-text="${textOf(body)}">Copy payload</button></p>`;
    await show({ title: "Payload", content });
  },
  async edit({ dataset }, { data, say, refresh }) {
    const letter = data.letters.find((m) => m.number === Number(dataset.id));
    const body = textOf(await bytes(path`/api/v1/dlq/${letter.number}/payload`));
    let pushed = null;
    await form({
      title: "Edit and requeue",
      button: "Requeue the edited message",
      text: html`<p>
          The edited payload goes to the end of ${letter.queue} / ${letter.partition} as a new message, with the same
          headers. Every group of ${letter.queue} will get it. The dead letter is removed; the new message keeps the old
          payload in its history, and the audit log records who did it.
        </p>
        <p class="bad">${visible(letter.error)}</p>`,
      fields: [{ name: "payload", label: "Payload (JSON)", kind: "json", value: body }],
      check: async (values) => {
        if (values.payload === body) return "Nothing has changed. To deliver it as it is, use Requeue.";
        try {
          const text = withJson({}, "payload", values.payload);
          pushed = await ask("POST", path`/api/v1/dlq/${letter.number}/edit`, { body: text });
        } catch (error) {
          return error.message;
        }
        return "";
      },
    });
    if (!pushed) return;
    const link = `#/messages/${encodeURIComponent(pushed.partitionId)}/${encodeURIComponent(pushed.transactionId)}`;
    say(html`Requeued as <a href="${link}">${pushed.transactionId}</a>.`);
    refresh();
  },
  async "requeue-one"(element, { say, refresh }) {
    const { id, to, group } = element.dataset;
    const text = html`<p>1 message in ${to} will be delivered to ${groupName(group)} again.</p>`;
    if (!(await confirm({ title: "Requeue a dead letter", text, button: "Requeue 1 message", danger: false }))) return;
    await ask("POST", "/api/v1/dlq/requeue", { query: { id } });
    say("It will be delivered again.");
    refresh();
  },
  async "requeue-chosen"(_, context) {
    const chosen = chosenLetters(context);
    const what = plural(chosen.length, "message");
    const text = html`<p>${what} will be delivered again, each to the group in which it failed.</p>
      ${bars(destinations({ errors: chosen.map((m) => ({ ...m, count: 1 })) }), count, "Destinations")}`;
    if (!(await confirm({ title: "Requeue dead letters", text, button: `Requeue ${what}`, danger: false }))) return;
    const { requeued, asked } = await actOnChosen("requeue", context);
    const left = asked - requeued;
    const why = "its queue is full, or its group was deleted";
    context.say(`${plural(requeued, "message")} requeued${left ? `; ${count(left)} could not be (${why})` : ""}.`);
  },
  async "delete-chosen"(_, context) {
    const what = plural(chosenLetters(context).length, "dead letter");
    const text = html`<p>${what} will be deleted. This cannot be undone.</p>`;
    if (!(await confirm({ title: "Delete dead letters", text, button: `Delete ${what}` }))) return;
    const { deleted } = await actOnChosen("delete", context);
    context.say(`${plural(deleted, "dead letter")} deleted.`);
  },
  async requeue(_, { query, data, say, refresh }) {
    const oldest = Math.min(...data.errors.map((row) => row.oldest));
    const what = plural(data.total, "message");
    const text = html`<p>
        ${what} ${inWords(query)} will be delivered again. The oldest was pushed ${ago(oldest)}. Consumers see them as
        new deliveries.
      </p>
      ${bars(destinations(data), count, "Destinations")}
      <p><small>The broker does this in the background; you can leave this page.</small></p>`;
    if (!(await confirm({ title: "Requeue dead letters", text, button: `Requeue ${what}`, danger: false }))) return;
    const task = await ask("POST", "/api/v1/tasks/requeue", { query: which(query) });
    say(`${plural(task.total, "message")} are being requeued.`);
    refresh();
  },
  async purge(_, { query, data, say, refresh }) {
    const typed = query.queue || "all queues";
    const what = plural(data.total, "dead letter");
    const text = html`<p>${what} ${inWords(query)} will be deleted. This cannot be undone.</p>
      ${bars(destinations(data), count, "Where they are")}`;
    if (!(await confirm({ title: "Purge dead letters", text, button: `Delete ${what}`, typed }))) return;
    const task = await ask("POST", "/api/v1/tasks/purge", { query: which(query) });
    say(`${plural(task.total, "dead letter")} are being deleted.`);
    refresh();
  },
};

export const deadLetters = {
  path: "/dead-letters",
  title: () => "Dead letters",
  every: 2000,
  async load(_, query, signal) {
    const [errors, listed, running] = await Promise.all([
      get("/api/v1/dlq/errors", { queue: query.queue, consumerGroup: query.group, filter: query.filter }, signal),
      get("/api/v1/dlq/previews", { ...which(query), limit: LISTED }, signal),
      loadTasks(signal),
    ]);
    return { ...errors, letters: listed.letters, tasks: running.tasks };
  },
  view,
  actions,
};
