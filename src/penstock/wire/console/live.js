/**
 * The live state of the broker: one stream for the tab, shared by all pages.
 *
 * `live.now` is the last snapshot, `live.history` the series behind the charts, `live.state` one of
 * connecting, live, paused (the tab is hidden), away (the broker does not answer), refused (no token).
 * While the broker does not answer, we retry with growing pauses of up to five seconds.
 */
import { ApiError, get, listen } from "./api.js";

const KEPT = 900; // samples: 15 minutes at one a second
const LONGEST_WAIT = 5000;

export const live = { now: null, history: { times: [], series: {} }, state: "connecting", since: Date.now() };
const watchers = new Set();
let ending = new AbortController();

/** Call `watcher()` after every change. Returns a function that stops it. */
export function watch(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function changed() {
  for (const watcher of watchers) watcher();
}

function become(state) {
  if (live.state !== state) {
    live.state = state;
    live.since = Date.now();
    changed();
  }
}

function seen(value) {
  if (value.history) live.history = value.history;
  const sample = value.sample ?? value.last;
  if (value.sample) {
    const { times, series } = live.history;
    times.push(value.at);
    for (const name of new Set([...Object.keys(series), ...Object.keys(value.sample)])) {
      series[name] ??= Array(times.length - 1).fill(null);
      series[name].push(value.sample[name] ?? null);
    }
    if (times.length > KEPT) {
      times.shift();
      for (const values of Object.values(series)) values.shift();
    }
  }
  live.now = { ...live.now, ...value, sample };
  if (live.state === "live") changed();
  else become("live");
}

const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });

async function run(signal) {
  let wait = 500;
  while (!signal.aborted) {
    try {
      await listen(
        "/api/v1/live",
        {},
        (value) => {
          wait = 500;
          seen(value);
        },
        signal,
      );
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        become("refused");
        return;
      }
    }
    if (signal.aborted) return;
    become("away");
    await pause(wait, signal);
    wait = Math.min(wait * 2, LONGEST_WAIT);
  }
}

/** Begin, or begin again (with another token). */
export function start() {
  ending.abort();
  ending = new AbortController();
  become("connecting");
  run(ending.signal);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    ending.abort();
    become("paused");
  } else if (live.state === "paused") {
    start();
  }
});

/** Return the subject and role of our token. */
export async function whoAmI() {
  return get("/api/v1/me");
}
