/** The actions on a queue and its groups. */
import { ask, path, withJson } from "../api.js";
import { html } from "../html.js";
import { count, plural } from "../format.js";
import { confirm, form } from "../components/dialog.js";
import { QUEUE_MODE, groupName as title } from "./common.js";
import { actions as scheduledActions } from "./scheduled.js";

export const actions = {
  ...scheduledActions,
  async push(_, { params, say, refresh }) {
    const values = await form({
      title: `Push a message to ${params.queue}`,
      button: "Push",
      fields: [
        { name: "payload", label: "Payload (JSON)", kind: "json", value: "{}" },
        { name: "partition", label: "Partition", value: "Default" },
        {
          name: "transactionId",
          label: "Transaction id",
          help: "a message with the same id in the same partition is stored once",
        },
        { name: "delay", label: "Deliver in", kind: "number", value: "0", help: "seconds; 0: now" },
        { name: "headers", label: "Headers (JSON)", value: "{}", help: "an object of strings" },
      ],
      check: async ({ payload, partition, transactionId, delay, headers }) => {
        try {
          const item = { queue: params.queue, partition: partition || "Default" };
          if (transactionId) item.transactionId = transactionId;
          if (Number(delay)) item.delay = Number(delay);
          if (Object.keys(JSON.parse(headers || "{}")).length) item.headers = JSON.parse(headers);
          const body = `{"items":[${withJson(item, "payload", payload)}]}`;
          const [pushed] = await ask("POST", "/api/v1/push", { body });
          say(`${pushed.status}: ${pushed.transaction_id}`);
        } catch (error) {
          return error.message;
        }
        return "";
      },
    });
    if (values) refresh();
  },
  async configure(_, { params, data, say, refresh }) {
    const { about, options: now } = data.list;
    const kind = (o) =>
      typeof o.default === "boolean"
        ? { choices: ["true", "false"] }
        : o.name === "ordering"
          ? { choices: ["partition", "none"] }
          : { kind: "number" };
    const changed = (values) =>
      Object.fromEntries(
        about
          .filter((o) => values[o.name] !== String(now[o.name]))
          .map((o) => [o.name, o.name === "ordering" ? values[o.name] : JSON.parse(values[o.name] || "null")]),
      );
    let sent = {};
    const values = await form({
      title: `Options of ${params.queue}`,
      button: "Save changes",
      text: "Options that you do not change keep their values.",
      fields: about.map((o) => ({
        name: o.name,
        label: o.name,
        value: String(now[o.name]),
        help: o.meaning,
        ...kind(o),
      })),
      check: async (given) => {
        sent = changed(given);
        if (!Object.keys(sent).length) return "Nothing has changed.";
        try {
          await ask("PATCH", path`/api/v1/queues/${params.queue}/options`, { body: sent });
        } catch (error) {
          return error.message;
        }
        return "";
      },
    });
    if (values) {
      say(
        `Changed: ${Object.entries(sent)
          .map(([name, value]) => `${name} = ${value}`)
          .join(", ")}.`,
      );
      refresh();
    }
  },
  async clear(_, { params, data, say, refresh }) {
    const text = html`<p>
      ${plural(data.stored, "message")} of ${params.queue} will be deleted for all groups; ${count(data.waiting)} of
      them have not been consumed. This cannot be undone.
    </p>`;
    if (
      !(await confirm({
        title: "Clear the queue",
        text,
        button: `Delete ${plural(data.stored, "message")}`,
        typed: params.queue,
      }))
    )
      return;
    await ask("DELETE", path`/api/v1/queues/${params.queue}/clear`);
    say(`${params.queue} is empty.`);
    refresh();
  },
  async delete(_, { params, data, say, go }) {
    const text = html`<p>
      The queue ${params.queue}, its ${plural(data.stored, "message")}, ${plural(data.groups.length, "group")} and
      ${plural(data.deadLetters ?? 0, "dead letter")} will be deleted.
    </p>`;
    if (!(await confirm({ title: "Delete the queue", text, button: `Delete ${params.queue}`, typed: params.queue })))
      return;
    await ask("DELETE", path`/api/v1/queues/${params.queue}`);
    say(`${params.queue} was deleted.`);
    go("#/queues");
  },
  async forget(element, { params, say, refresh }) {
    const { group, waiting } = element.dataset;
    const text = html`<p>
      The group ${title(group)} of ${params.queue} will be deleted with its position. The ${count(Number(waiting))}
      messages it has not consumed will not be delivered to it.
    </p>`;
    if (!(await confirm({ title: "Delete the group", text, button: `Delete ${title(group)}`, typed: title(group) })))
      return;
    await ask("DELETE", path`/api/v1/consumer-groups/${group || QUEUE_MODE}/queues/${params.queue}`);
    say(`The group ${title(group)} was deleted.`);
    refresh();
  },
  async seek(element, { params, say, refresh }) {
    const { group } = element.dataset;
    const url = path`/api/v1/consumer-groups/${group || QUEUE_MODE}/queues/${params.queue}/seek`;
    const values = await form({
      title: `Seek ${title(group)}`,
      button: "Preview",
      fields: [
        { name: "to", label: "To", choices: ["beginning", "end", "time"], value: "beginning" },
        { name: "time", label: "Time", kind: "datetime-local", help: "only for “time”" },
      ],
      check: ({ to, time }) => (to === "time" && !time ? "Choose a time." : ""),
    });
    if (!values) return;
    const time = values.time && new Date(values.time).toISOString();
    const body = { beginning: { toBeginning: true }, end: { toEnd: true }, time: { timestamp: time } }[values.to];
    const preview = await ask("POST", url, { body: { ...body, dryRun: true } });
    const text = html`<p>
      ${plural(preview.redelivered, "message")} will be delivered to ${title(group)} again;
      ${plural(preview.skipped, "message")} that it has not consumed will be skipped.
    </p>`;
    if (
      !(await confirm({
        title: "Seek",
        text,
        button: `Deliver ${plural(preview.redelivered, "message")} again`,
        danger: preview.skipped > 0,
      }))
    )
      return;
    await ask("POST", url, { body });
    say(`${title(group)} continues from ${values.to}.`);
    refresh();
  },
};
