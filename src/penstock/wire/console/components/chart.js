/**
 * Charts as SVG text: lines over time, bars, sparklines. At most four lines, labels beside the lines,
 * counts from 0, gaps where there is no data. The hover line and its values are drawn by chart-hover.
 */
import { each, html, svg } from "../html.js";
import { clock, day, short } from "../format.js";

const WIDTH = 600;
const HEIGHT = 180;
const LEFT = 44;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 20;

/** The same colour for the same thing on every page. */
const COLOURS = {
  in: "1",
  pushed: "1",
  produced: "1",
  out: "2",
  delivered: "2",
  sent: "2",
  completed: "2",
  waiting: "3",
  lag: "3",
  failed: "3",
  p99: "3",
  p50: "1",
  "dead letters": "4",
  dropped: "4",
};
export const colourOf = (name, index = 0) => COLOURS[name] ?? String((index % 4) + 1);

/** A round number at or above `value`: 1, 2, 2.5 or 5 times a power of ten. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value);
}

const MINUTE = 60_000;

/**
 * The means of steps of `ms`, for series of seconds that are joined to series of minutes: seconds jump, and a
 * line that jumps only at its end looks like an outage. A step that has just begun says nothing yet.
 */
export function inSteps({ times, series }, ms = 10_000) {
  const groups = new Map(); // step -> the indexes of its samples
  times.forEach((time, i) => {
    const step = Math.floor(time / ms);
    groups.set(step, [...(groups.get(step) ?? []), i]);
  });
  const last = Math.floor((times.at(-1) ?? 0) / ms);
  if (groups.size > 1 && groups.get(last)?.length < ms / 2000) groups.delete(last);
  const steps = [...groups];
  const mean = (values) => {
    const known = values.filter((value) => value !== null && value !== undefined);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  return {
    times: steps.map(([step]) => (step + 0.5) * ms), // not the mean of its samples: those of two steps may be close
    series: Object.fromEntries(
      Object.entries(series).map(([name, values]) => [
        name,
        steps.map(([, places]) => mean(places.map((i) => values[i]))),
      ]),
    ),
  };
}

/** Path data of the points that have a value, with gaps where they have none, and where nobody sampled for long. */
function path(values, x, y, times = []) {
  let text = "";
  let open = false;
  const longest = 2.5 * Math.max(MINUTE, (times.at(-1) - times[0]) / (times.length - 1));
  for (let i = 0; i < values.length; i += 1) {
    const value = values[i];
    if (value === null || value === undefined) {
      open = false;
      continue;
    }
    if (times[i] - times[i - 1] > longest) open = false;
    text += open ? `L${x(i).toFixed(1)} ${y(value).toFixed(1)}` : `M${x(i).toFixed(1)} ${y(value).toFixed(1)}h.1`; // one alone is a dot
    open = true;
  }
  return text;
}

/**
 * Lines over time.
 * @param {{times: number[], series: {name: string, values: (number|null)[]}[],
 *          format?: (value: number) => string, title: string}} data
 */
export function lines({ times, series, format = short, title }) {
  const some = series.slice(0, 4);
  const shown = some.flatMap((one) => one.values).filter((value) => value !== null && value !== undefined);
  if (times.length < 2 || !shown.length) {
    return html`<div class="chart empty" role="img" aria-label="${title}: no data yet">no data yet</div>`;
  }
  const top = roundUp(Math.max(...shown));
  const start = times[0];
  const span = times[times.length - 1] - start || 1;
  const x = (i) => LEFT + ((times[i] - start) / span) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const last = (values) => values.findLast((value) => value !== null && value !== undefined);
  const label = span > 36 * 3600e3 ? day : (at) => clock(at).slice(0, span > 300e3 ? 5 : 8);
  const ticks = [0, 0.5, 1].map((share) => share * top);
  const marks = [0, 0.5, 1].map((share) => start + share * span);
  const summary = some.map((one) => `${one.name} ${format(last(one.values) ?? 0)}`).join(", ");
  return html`<figure class="chart" .points="${{ times, series: some }}">
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label="${title}: ${summary}">
      ${ticks.map(
        (tick) => svg`<line class="grid" x1="${LEFT}" x2="${WIDTH - RIGHT}" y1="${y(tick)}"
        y2="${y(tick)}"/>`,
      )}
      ${some.map(
        (one, i) => svg`<path class="line c${colourOf(one.name, i)}"
        d="${path(one.values, x, y, times)}"/>`,
      )}
      <line class="hover" x1="-9" x2="-9" y1="${TOP}" y2="${HEIGHT - BOTTOM}" />
    </svg>
    <div class="ticks" aria-hidden="true">${ticks.toReversed().map((tick) => html`<span>${format(tick)}</span>`)}</div>
    <div class="times" aria-hidden="true">${marks.map((at) => html`<span>${label(at)}</span>`)}</div>
    <figcaption>
      ${some.map(
        (one, i) =>
          html`<span class="key c${colourOf(one.name, i)}">${one.name} <b>${format(last(one.values))}</b></span>`,
      )}<span class="at"></span>
    </figcaption>
  </figure>`;
}

/** A line without axes, for a cell of a table. */
export function sparkline(values, name = "in", title = "") {
  const shown = values.filter((value) => value !== null && value !== undefined);
  if (shown.length < 2) return html`<svg class="spark" viewBox="0 0 80 20" aria-hidden="true"></svg>`;
  const top = Math.max(...shown) || 1;
  const d = path(
    values,
    (i) => (i / (values.length - 1)) * 80,
    (value) => 18 - (value / top) * 16,
  );
  return html`<svg class="spark" viewBox="0 0 80 20" role="img" aria-label="${title}">
    <path class="line c${colourOf(name)}" d="${d}" />
  </svg>`;
}

/** Bars beside their labels: rows of {label, value, href?, more?}. */
export function bars(rows, format = short, title = "") {
  const top = Math.max(...rows.map((row) => row.value ?? 0), 1);
  return html`<ul class="bars" aria-label="${title}">
    ${each(
      rows,
      (row) => row.label,
      (row) =>
        html`<li>
          <span title="${row.label}">${row.href ? html`<a href="${row.href}">${row.label}</a>` : row.label}</span>
          <svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
            <rect class="bar" width="${Math.max(0, (row.value ?? 0) / top) * 100}" height="8" />
          </svg>
          <b>${format(row.value)}</b><small>${row.more ?? ""}</small>
        </li>`,
    )}
  </ul>`;
}

/** Show the values under the pointer, for all charts of the page. */
export function followPointer(root, format = short) {
  root.addEventListener("pointermove", (event) => {
    const figure = event.target instanceof Element ? event.target.closest("figure.chart") : null;
    if (!figure) return;
    const svg = figure.querySelector("svg");
    const { times, series } = figure.points;
    const start = times[0];
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const span = times[times.length - 1] - start || 1;
    const wanted = start + ((at - LEFT) / (WIDTH - LEFT - RIGHT)) * span;
    let nearest = 0;
    times.forEach((time, i) => {
      if (Math.abs(time - wanted) < Math.abs(times[nearest] - wanted)) nearest = i;
    });
    const place = LEFT + ((times[nearest] - start) / span) * (WIDTH - LEFT - RIGHT);
    const hover = svg.querySelector(".hover");
    hover.setAttribute("x1", place);
    hover.setAttribute("x2", place);
    const values = series.map(
      (one) => `${one.name} ${one.values[nearest] === null ? "–" : format(one.values[nearest])}`,
    );
    const utc = new Date(times[nearest]).toISOString().slice(11, 19);
    figure.querySelector(".at").textContent = `${clock(times[nearest])} (${utc} UTC): ${values.join(", ")}`;
  });
}
