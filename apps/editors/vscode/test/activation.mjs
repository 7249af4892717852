// Milliseconds from reading the extension to the end of `activate`, in a Node that has not seen it.
// Its `vscode` takes whatever is asked of it, so that VS Code's own work is not measured.

import { readFileSync } from "node:fs";
import Module, { createRequire } from "node:module";
import { performance } from "node:perf_hooks";
import { fileURLToPath } from "node:url";

function anything() {
  const known = new Map();
  return new Proxy(function () {}, {
    get: (target, name) => {
      if (name === "prototype" || name === Symbol.toPrimitive) {
        return name === "prototype" ? target.prototype : () => "";
      }
      if (name === "get") {
        return (_, otherwise) => otherwise;
      }
      if (!known.has(name)) {
        known.set(name, anything());
      }
      return known.get(name);
    },
    set: (_, name, value) => Boolean(known.set(name, value)),
    apply: anything,
    construct: (_, __, of) => Object.create(of.prototype),
  });
}

const file = fileURLToPath(new URL("../dist/extension.js", import.meta.url));
const names = readFileSync(file, "utf8").matchAll(/\.([A-Za-z]\w*)/g);
const vscode = Object.fromEntries([...names].map(([, name]) => [name, anything()]));
const load = Module._load;
Module._load = (name, ...others) => (name === "vscode" ? vscode : load(name, ...others));
process.env.PATH = ""; // no server is started
const since = performance.now();
createRequire(import.meta.url)(file).activate({ subscriptions: [] });
console.log(performance.now() - since);
process.exit(0);
