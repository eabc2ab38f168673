/** The life of a message as a line of moments: pushed, taken, failed, dead letter, requeued. */
import { html } from "../html.js";
import { clock, duration, moment } from "../format.js";

const KINDS = { pushed: "ok", taken: "ok", acked: "ok", failed: "bad", dead: "bad", requeued: "note", trace: "note" };

/** @param {{at: number, what: string, kind: string, who?: string, why?: string}[]} events in order of time */
export function timeline(events) {
  return html`<ol class="timeline">${events.map((event, i) => html`<li class="${KINDS[event.kind] ?? "note"}">
    <b>${event.what}</b> <time title="${moment(event.at)}">${clock(event.at, true)}</time>
    ${i && event.at - events[i - 1].at >= 1 ? html`<small>+${duration((event.at - events[i - 1].at) / 1000)}</small>` : ""}
    ${event.who ? html`<div>${event.who}</div>` : ""}${event.why ? html`<div class="why">${event.why}</div>` : ""}
  </li>`)}</ol>`;
}
