// node search.js SITE QUERY...: print, for each query, the pages that the site's own search returns, best first.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")));
const scope = { addEventListener: (_, listener) => (scope.listener = listener), importScripts: () => {} };
scope.self = scope;
vm.runInNewContext(fs.readFileSync(path.join(folder, script), "utf8"), scope);

function ask(type, data) {
  return new Promise((resolve) => {
    scope.postMessage = (answer) => resolve(answer.data);
    scope.listener({ data: { type, data } });
  });
}

(async () => {
  await ask(0, { ...index, options: { suggest: false } });
  for (const query of queries) {
    const { items } = await ask(2, query);
    console.log(JSON.stringify(items.map((sections) => sections[0].location)));
  }
})();
