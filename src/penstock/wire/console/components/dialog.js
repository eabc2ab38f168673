/**
 * Dialogs that show the effect of an action, in numbers, before it happens. One at a time; Escape and Cancel close.
 *
 *   const yes = await confirm({ title, text: html`...`, button: "Requeue 31 messages", typed: "orders" })
 *   const values = await form({ title, fields: [{ name, label, value, kind, help }], button })
 */
import { html, render } from "../html.js";

const host = () => document.getElementById("dialog");

function open({ title, content, button, danger, check }) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    render(
      host(),
      html`<dialog aria-labelledby="dialog-title">
        <form method="dialog">
          <h2 id="dialog-title">${title}</h2>
          ${content}
          <p class="problem" role="alert"></p>
          <menu>
            <button type="button" data-cancel>Cancel</button>
            ${button ? html`<button type="submit" class="${danger ? "danger" : "primary"}" value="yes">${button}</button>` : ""}
          </menu>
        </form>
      </dialog>`,
    );
    const dialog = host().querySelector("dialog");
    const end = (value) => {
      dialog.close();
      render(host(), "");
      before?.focus?.();
      resolve(value);
    };
    dialog.querySelector("[data-cancel]").addEventListener("click", () => end(null));
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      end(null);
    });
    dialog.querySelector("form").addEventListener("submit", async (event) => {
      event.preventDefault();
      const values = Object.fromEntries(new FormData(event.target));
      const problem = await check(values);
      if (problem) dialog.querySelector(".problem").textContent = problem;
      else end(values);
    });
    dialog.showModal();
  });
}

/** @returns {Promise<boolean>} */
export async function confirm({ title, text, button, danger = true, typed = "" }) {
  const content = html`<div class="text">${text}</div>
    ${
      typed
        ? html`<label
            >Type <b>${typed}</b> to confirm <input name="typed" autocomplete="off" spellcheck="false" required
          /></label>`
        : ""
    }`;
  const check = (values) => (typed && values.typed !== typed ? `Type ${typed} exactly as it is written.` : "");
  return (await open({ title, content, button, danger, check })) !== null;
}

function field({ name, label, value = "", kind = "text", help = "", choices }) {
  const control = choices
    ? html`<select name="${name}">
        ${choices.map((choice) => html`<option value="${choice}" .selected="${choice === value}">${choice}</option>`)}
      </select>`
    : kind === "json"
      ? html`<textarea name="${name}" rows="6" spellcheck="false" .value="${value}"></textarea>`
      : html`<input name="${name}" type="${kind}" value="${value}" autocomplete="off" />`;
  return html`<label>${label} ${control}${help ? html`<small>${help}</small>` : ""}</label>`;
}

/** @returns {Promise<Record<string, string>|null>} what was typed; null when it was cancelled */
export function form({ title, text = "", fields, button, check = () => "" }) {
  return open({
    title,
    content: html`<div class="text">${text}</div>
      ${fields.map(field)}`,
    button,
    check,
  });
}

/** Show content without a question. */
export function show({ title, content }) {
  return open({ title, content, button: "", check: () => "" });
}
