/** Background tasks of the broker, shown with their progress on the page that started them. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count } from "../format.js";
import { button, since } from "./common.js";

const RECENT = 10 * 60_000;
const VERBS = { requeue: "Requeue", purge: "Purge" };
const DONE = { requeue: "requeued", purge: "deleted" };

export const loadTasks = (signal) => get("/api/v1/tasks", {}, signal);

/** Load the running tasks and those that ended recently. */
export function tasks(list, context) {
  const shown = list.filter((task) => task.state === "running" || Date.now() - task.endedAt < RECENT).slice(0, 5);
  if (!shown.length) return "";
  return html`<section class="card tasks" aria-label="Background tasks">
    ${shown.map(
      (task) =>
        html`<div data-key="${task.id}">
          <b>${VERBS[task.kind]}</b> ${task.what} <small>by ${task.who}, ${since(task.startedAt)}</small> ${
            task.state === "running"
              ? html`<progress
                  max="${Math.max(task.total, 1)}"
                  value="${task.done}"
                  aria-label="${VERBS[task.kind]} ${task.what}"
                ></progress>`
              : html`<span class="badge ${task.state === "finished" ? "good" : "bad"}">${task.state}</span>`
          }
          ${count(task.done)} of ${task.exact ? "" : "at least "}${count(task.total)} ${DONE[task.kind]}
          ${task.error ? html`<span class="bad">${task.error}</span>` : ""}
          ${task.state === "running" ? button(context, "read_write", "cancel-task", "Cancel", { data: { task: task.id } }) : ""}
        </div>`,
    )}
  </section>`;
}

export async function cancelTask(element, { say, refresh }) {
  const task = await ask("DELETE", path`/api/v1/tasks/${element.dataset.task}`);
  say(`Cancelled after ${count(task.done)}.`);
  refresh();
}
