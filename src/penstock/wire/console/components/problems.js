/**
 * The strip of problems: one line with the worst, the others on request. Acknowledged problems are
 * hidden in this browser until they are over; new ones are shown.
 */
import { each, html } from "../html.js";
import { count, duration, moment } from "../format.js";

const STORE = "penstock.acknowledged";
let open = false;

const acknowledged = () => new Set(JSON.parse(localStorage.getItem(STORE) ?? "[]"));

/** Problems are identified by their texts, which contain no changing figures. */
function keep(texts) {
  localStorage.setItem(STORE, JSON.stringify([...texts]));
}

const line = (problem) =>
  html`<a class="${problem.level}" href="#${problem.path}" title="${problem.text}">${problem.text}</a> ${
      problem.since
        ? html`<small title="since ${moment(problem.since)}"
            >for ${duration((Date.now() - problem.since) / 1000)}</small
          >`
        : ""
    }`;

/** @param {{level: string, text: string, since: number|null, path: string}[]|undefined} list the worst first */
export function problems(list) {
  if (!list) return ""; // not known yet: nothing is over
  const seen = acknowledged();
  const over = [...seen].filter((text) => !list.some((problem) => problem.text === text));
  if (over.length) keep([...seen].filter((text) => !over.includes(text)));
  const shown = list.filter((problem) => !seen.has(problem.text));
  if (!shown.length) return "";
  const rest = shown.slice(1);
  return html`<section class="problems" aria-label="Problems">
    <div class="line">
      <b>! ${count(shown.length)} <span class="wide">${shown.length === 1 ? "problem" : "problems"}</span></b>
      <span class="worst">${line(shown[0])}</span>
      ${
        rest.length
          ? html`<button class="plain link" data-action="problems" aria-expanded="${open ? "true" : "false"}">
              ${open ? "show one" : html`<span class="wide">and</span> ${count(rest.length)} more`}
            </button>`
          : ""
      }
      <button class="plain link" data-action="acknowledge" title="Hide until they are over. New ones are shown.">
        Acknowledge
      </button>
    </div>
    ${
      open && rest.length
        ? html`<ul>
            ${each(
              rest,
              (problem) => problem.text,
              (problem) => html`<li>${line(problem)}</li>`,
            )}
          </ul>`
        : ""
    }
  </section>`;
}

/** The number of acknowledged, hidden problems. */
export const hidden = (list) => {
  const seen = acknowledged();
  return list.filter((problem) => seen.has(problem.text)).length;
};

export const problemActions = {
  problems: () => {
    open = !open;
  },
  acknowledge: (list) => keep(list.map((problem) => problem.text)),
  "show-acknowledged": () => keep([]),
};
