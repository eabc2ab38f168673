/**
 * The Console's frame: navigation, addresses, keys, the strip of problems, and the page in the middle.
 *
 * An address is `#/queues/orders?filter=...&sort=-depth`: everything a view shows is in it, so it can
 * be sent to a colleague. A page is an object:
 *
 *   title(params)                what the tab and the crumbs say
 *   load(params, query, signal)  its data; asked on entry, then every `every` ms while it is visible
 *   view(data, context)          its markup; also drawn again when the live state changes
 *   actions                      name -> async (element, context): what data-action="name" does
 *
 * A page that fails to load shows what the broker said and tries again by itself.
 */
import { ApiError, token } from "./api.js";
import { count, duration, moment, plural } from "./format.js";
import { html, on, render } from "./html.js";
import { live, start, watch, whoAmI } from "./live.js";
import { followPointer } from "./components/chart.js";
import { followRows, release } from "./components/table.js";
import { show } from "./components/dialog.js";
import { pages } from "./pages/index.js";

const REFRESH = 2000;
const app = document.getElementById("app");
const toast = document.getElementById("toast");

/** @type {{subject: string|null, role: string, authentication: boolean}|null} */
let me = null;
let page = null; // { route, params, query, data, error, state }
let loading = null;
let timer = 0;

const ROLES = ["read_only", "read_write", "admin"];
/** Whether our token allows what needs `role`. */
const may = (role) => ROLES.indexOf(me?.role ?? "read_only") >= ROLES.indexOf(role);

// Addresses

function parse(address) {
  const [path, search = ""] = address.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: Object.fromEntries(new URLSearchParams(search)) };
}

function match(parts) {
  for (const route of pages) {
    const wanted = route.path.split("/").filter(Boolean);
    const fits = (part, i) => part.startsWith(":") || part === parts[i];
    if (wanted.length !== parts.length || !wanted.every(fits)) continue;
    const named = wanted.map((part, i) => [part.slice(1), parts[i]]).filter((_, i) => wanted[i].startsWith(":"));
    return { route, params: Object.fromEntries(named) };
  }
  return null;
}

/** Go to another address. */
export function go(address) {
  location.hash = address.replace(/^#/, "");
}

/** The address of this view with other values in its query; empty ones leave it. */
function withQuery(changes) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries({ ...page.query, ...changes })) {
    if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  const path = location.hash.replace(/^#/, "").split("?")[0];
  return `#${path}${[...query].length ? `?${query}` : ""}`;
}

function navigate() {
  const { parts, query } = parse(location.hash || "#/overview");
  const matched = match(parts);
  const same =
    page && matched && page.route === matched.route && JSON.stringify(page.params) === JSON.stringify(matched.params);
  page = matched
    ? { ...matched, query, data: same ? page.data : null, error: null, state: same ? page.state : {} }
    : { route: null, query, data: null, error: null, state: {} };
  document.title = `${page.route ? page.route.title(page.params) : "Not found"} · Penstock`;
  release();
  draw();
  refresh();
  if (!same) {
    document.getElementById("main")?.focus({ preventScroll: true });
    requestAnimationFrame(() =>
      document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }),
    );
  }
}

// Data

async function refresh() {
  clearTimeout(timer);
  loading?.abort();
  const mine = page;
  if (!mine?.route?.load || document.hidden) return;
  loading = new AbortController();
  try {
    mine.data = await mine.route.load(mine.params, mine.query, loading.signal);
    mine.error = null;
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error instanceof ApiError && error.status === 401) {
      signIn();
      return;
    }
    mine.error = error;
  }
  if (mine !== page) return;
  draw();
  timer = setTimeout(refresh, mine.route.every ?? REFRESH);
}

/** Say what happened, for a few seconds. */
function say(text, kind = "note") {
  render(toast, html`<p class="${kind}">${text}</p>`);
  clearTimeout(say.timer);
  say.timer = setTimeout(() => render(toast, ""), 6000);
}

const context = {
  get params() {
    return page.params;
  },
  get query() {
    return page.query;
  },
  get data() {
    return page.data;
  },
  get state() {
    return page.state;
  },
  get me() {
    return me;
  },
  may,
  go,
  say,
  withQuery,
  refresh: () => {
    release();
    return refresh();
  },
  draw: () => draw(),
};

// Drawing

const NAVIGATION = [
  ["overview", "Overview"],
  ["queues", "Queues", "queues"],
  ["topics", "Topics", "topics"],
  ["dead-letters", "Dead letters", "deadLetters"],
  ["routes", "Routes", "routes"],
  ["buffers", "Buffers"],
  ["pipelines", "Pipelines", "pipelines"],
  ["schedules", "Schedules", "schedules"],
  ["system", "System"],
];

const STATES = {
  live: "live",
  connecting: "connecting",
  paused: "paused",
  refused: "no access",
  away: "broker unreachable, retrying",
};

function navigation() {
  const counts = live.now?.counts ?? {};
  const current = location.hash.split(/[/?]/)[1] || "overview";
  return html`<nav aria-label="Views">
    <a class="brand" href="#/overview"><img src="icon.svg" alt="" width="20" height="20" /> Penstock</a>
    <ul>
      ${NAVIGATION.map(
        ([name, title, figure]) =>
          html`<li>
            <a href="#/${name}" aria-current="${name === current ? "page" : null}">
              ${title}${figure && counts[figure] ? html` <span class="badge ${figure === "deadLetters" ? "bad" : ""}">${count(counts[figure])}</span>` : ""}</a
            >
          </li>`,
      )}
    </ul>
  </nav>`;
}

function problems() {
  const list = live.now?.problems ?? [];
  if (!list.length) return "";
  return html`<section class="problems" aria-label="Problems">
    <b>! ${plural(list.length, "problem")}</b>
    <ul>
      ${list.slice(0, 5).map(
        (problem) =>
          html`<li class="${problem.level}">
            <a href="#${problem.path}">${problem.text}</a>
            ${problem.since ? html`<small title="since ${moment(problem.since)}">for ${duration((Date.now() - problem.since) / 1000)}</small>` : ""}
          </li>`,
      )}
      ${list.length > 5 ? html`<li>and ${count(list.length - 5)} more</li>` : ""}
    </ul>
  </section>`;
}

function content() {
  if (!page.route)
    return html`<h1>Not found</h1>
      <p>There is no view at this address. <a href="#/overview">Overview</a></p>`;
  if (page.error) {
    return html`${page.data ? page.route.view(page.data, context) : html`<h1>${page.route.title(page.params)}</h1>`}
      <p class="problem" role="alert">${page.error.message}</p>`;
  }
  if (page.route.load && !page.data)
    return html`<h1>${page.route.title(page.params)}</h1>
      <p class="loading">…</p>`;
  return page.route.view(page.data, context);
}

function crumbs() {
  if (!page.route) return "";
  return page.route.crumbs ? page.route.crumbs(page.params, page.data) : html`<b>${page.route.title(page.params)}</b>`;
}

let drawn = 0;
function draw() {
  if (drawn) return; // once per frame, however much changed
  drawn = requestAnimationFrame(() => {
    drawn = 0;
    if (!page) return;
    const who = me?.authentication ? `${me.subject ?? "someone"} (${me.role.replace("_", " ")})` : "";
    render(
      app,
      html`${navigation()}
        <header>
          <div class="crumbs">${crumbs()}</div>
          <span class="state ${live.state}" title="since ${new Date(live.since).toLocaleString()}"
            >● ${STATES[live.state]}</span
          >
          <button class="plain" data-action="find" aria-label="Filter this list" title="Filter this list ( / )">
            ⌕
          </button>
          <button class="plain" data-action="theme" aria-label="Light or dark" title="Light or dark">☾</button>
          <button class="plain" data-action="keys" aria-label="Keys" title="Keys ( ? )">?</button>
          ${who ? html`<button class="plain" data-action="sign-out" title="Sign out">${who}</button>` : ""}
        </header>
        ${problems()}
        <main id="main" tabindex="-1">${content()}</main>`,
    );
  });
}

// Signing in

function signIn(problem = "") {
  clearTimeout(timer);
  page = null;
  document.title = "Sign in · Penstock";
  render(
    app,
    html`<main class="sign-in" id="main">
      <h1>Penstock</h1>
      <form data-form="sign-in">
        <label>Token <input name="token" type="password" autocomplete="off" required autofocus /></label>
        <p class="problem" role="alert">${problem}</p>
        <button class="primary">Sign in</button>
        <p><small>This broker requires a token (JWT). It is kept in this tab only.</small></p>
      </form>
    </main>`,
  );
}

on(document, "submit", "form[data-form='sign-in']", (event, form) => {
  event.preventDefault();
  token.set(new FormData(form).get("token").trim());
  begin();
});

// Keys and clicks

const KEYS = [
  ["/", "filter this list"],
  ["?", "show these keys"],
  ["g o", "overview"],
  ["g q", "queues"],
  ["g t", "topics"],
  ["g d", "dead letters"],
  ["g r", "routes"],
  ["g b", "buffers"],
  ["g p", "pipelines"],
  ["g c", "schedules"],
  ["g s", "system"],
  ["↑ ↓ Enter", "move in a list, open a row"],
  ["Esc", "close, leave the filter"],
];
const GO = {
  o: "overview",
  q: "queues",
  t: "topics",
  d: "dead-letters",
  r: "routes",
  c: "schedules",
  b: "buffers",
  p: "pipelines",
  s: "system",
};
let pressed = "";

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target instanceof Element && event.target.closest("input, textarea, select, dialog");
  if (typing) {
    if (event.key === "Escape" && event.target.matches("[data-filter]")) event.target.blur();
    return;
  }
  if (pressed === "g" && GO[event.key]) go(`#/${GO[event.key]}`);
  else if (event.key === "/") {
    event.preventDefault();
    actions.find();
  } else if (event.key === "?") actions.keys();
  pressed = event.key;
});

const actions = {
  find: () => {
    const filter = document.querySelector("[data-filter]");
    filter?.focus();
    filter?.select();
  },
  keys: () =>
    show({
      title: "Keys",
      content: html`<dl class="keys">
        ${KEYS.map(
          ([key, what]) =>
            html`<dt><kbd>${key}</kbd></dt>
              <dd>${what}</dd>`,
        )}
      </dl>`,
    }),
  theme: () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    localStorage.setItem("penstock.theme", document.documentElement.dataset.theme);
  },
  "sign-out": () => {
    token.set("");
    location.reload();
  },
  sort: (element) => go(withQuery({ sort: element.dataset.sort, offset: "" })),
  copy: async (element) => {
    await navigator.clipboard?.writeText(element.dataset.text);
    say("Copied.");
  },
};

on(document, "click", "[data-action]", async (event, element) => {
  if (element.disabled) return;
  const action = page?.route?.actions?.[element.dataset.action] ?? actions[element.dataset.action];
  if (!action) return;
  if (element.tagName !== "INPUT") event.preventDefault();
  try {
    await action(element, context);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, "bad");
  }
});

let typing = 0;
on(document, "input", "[data-filter]", (_, input) => {
  clearTimeout(typing);
  typing = setTimeout(
    () =>
      history.replaceState(null, "", withQuery({ [input.dataset.filter || "filter"]: input.value, offset: "" })) ??
      navigate(),
    200,
  );
});
on(document, "change", "[data-choice]", (_, select) =>
  go(withQuery({ [select.dataset.choice]: select.value, offset: "" })),
);

// Beginning

async function begin() {
  try {
    me = await whoAmI();
  } catch (error) {
    if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
      signIn(token.get() ? error.message : "");
      return;
    }
    me = { subject: null, role: "read_only", authentication: false };
    setTimeout(begin, 2000); // the broker is away: ask again who we are when it is back
  }
  start();
  navigate();
}

if (localStorage.getItem("penstock.theme"))
  document.documentElement.dataset.theme = localStorage.getItem("penstock.theme");
followPointer(app);
followRows(app, go);
watch(() => {
  if (live.state === "refused") signIn("This token is no longer valid.");
  else if (page) draw();
});
addEventListener("hashchange", navigate);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && page) refresh();
});
begin();
