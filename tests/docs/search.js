// Asks the search of a built site: node search.js SITE QUERY ... prints the found sections of each page, best page first.
"use strict";

const { readdirSync, readFileSync } = require("node:fs");
const { join } = require("node:path");

const [site, ...queries] = process.argv.slice(2);
const { config, docs } = JSON.parse(readFileSync(join(site, "search", "search_index.json"), "utf8"));
const workers = join(site, "assets", "javascripts", "workers");
const [worker] = readdirSync(workers).filter((file) => /^search\..*\.js$/.test(file));

// The theme's own worker runs here; it needs this much of a browser.
let listen, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (_type, listener) => (listen = listener);
globalThis.postMessage = (message) => answer(message);
(0, eval)(readFileSync(join(workers, worker), "utf8"));

const [SETUP, QUERY] = [0, 2];
const ask = (type, data) =>
  new Promise((resolve) => {
    answer = ({ data }) => resolve(data);
    listen({ data: { type, data } });
  });

async function main() {
  await ask(SETUP, { config, docs, options: { suggest: true } });
  const found = {};
  for (const query of queries) {
    const { items } = await ask(QUERY, query);
    found[query] = items.map((sections) => sections.map(({ location }) => location));
  }
  console.log(JSON.stringify(found));
}

main();
