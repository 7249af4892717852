// The packaged extension in a real VS Code, against the real language server.
//
//     npm test                          installs VS Code's server into .vscode-server first
//     KVQ_PICTURE=vscode.png npm test   a picture of ghost text by the embedded model instead
//
// KVQ_VSCODE: where the server is or shall be; KVQ_PYTHON: a Python with kvq; KVQ_CHROMIUM: a browser.

import assert from "node:assert/strict";
import { chmodSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { install, until, VisualStudioCode } from "./vscode.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const root = join(here, "../../../..");
const python = process.env.KVQ_PYTHON ?? "python3";
const picture = process.env.KVQ_PICTURE;
const data = mkdtempSync(join(tmpdir(), "kvq-vscode-"));
const folder = join(data, "work");
const settingsFile = join(data, "server/data/Machine/settings.json");
const pidFile = join(data, "pid");
const loaded = join(data, "loaded");

const STATUS = '[id="kvq.kvq.kvq"]';
const GHOST = ".monaco-editor [class*='ghost-text']";
const TOAST = ".notification-toast";

const settings = {
  "kvq.path": join(data, "kvq"),
  "kvq.enable": { markdown: false },
  "chat.disableAIFeatures": true,
  "editor.minimap.enabled": false,
  "editor.quickSuggestions": { other: "off", comments: "off", strings: "off" },
  "workbench.startupEditor": "none",
  "workbench.colorTheme": "Default Light Modern",
};

function prepare() {
  mkdirSync(folder, { recursive: true });
  const server = picture ? "-m kvq_apps.cli" : `"${join(root, "tests/support/fake_lsp.py")}"`;
  writeFileSync(
    settings["kvq.path"],
    `#!/bin/sh\necho $$ > "${pidFile}"\nexec "${python}" ${server} "$@"\n`,
  );
  chmodSync(settings["kvq.path"], 0o755);
}

function file(name, text) {
  writeFileSync(join(folder, name), text);
}

function change(changes) {
  Object.assign(settings, changes);
  writeFileSync(settingsFile, JSON.stringify(settings));
}

const scenarios = {
  async "while the model loads it says so, and then shows"(code) {
    file("a.txt", "one\n");
    await open(code, "a.txt");
    await code.press("Control", "End");
    await code.type("gre");
    await says(code, "kvq: no completion: the model is loading");
    writeFileSync(loaded, "");
    await shows(code, "et(name, loudly=True)");
  },

  async "a draft is shown, others are gone through, one is taken"(code) {
    await code.type("e");
    await shows(code, "t(name, loudly=True)");
    await code.press("Backspace");
    await shows(code, "et(name, loudly=True)");
    await says(code, "kvq: 3 suggestions; Alt+] and Alt+[ go through them");
    await code.press("Alt", "BracketRight");
    await shows(code, "et_all(names)");
    await code.press("Alt", "BracketLeft");
    await shows(code, "et(name, loudly=True)");
    await code.press("Alt", "BracketRight");
    await shows(code, "et_all(names)");
    await code.press("Tab");
    await lineIs(code, "greet_all(names)");
    // With nothing to take, the key is the editor's own again.
    await code.press("Tab");
    await lineIs(code, "greet_all(names)    ");
  },

  async "words and lines are taken one by one, and Escape hides"(code) {
    await code.press("Enter");
    await code.press("Home");
    await code.type("plu");
    await until(async () => (await ghost(code)).includes("ral("), "a draft of several lines");
    await code.press("Control", "ArrowRight");
    await lineIs(code, "plural");
    await until(async () => (await ghost(code)).includes("("), "the rest");
    await code.press("Shift", "Tab");
    await lineIs(code, "plural(");
    await code.press("Enter");
    await code.type("gre");
    await shows(code, "et(name, loudly=True)");
    // The editor's own list finds `greet_all` above: what goes on from that is shown.
    await code.press("Control", "Space");
    await code.find(".suggest-widget.visible");
    await shows(code, "et_all(names)");
    await code.press("Escape");
    await code.press("Escape");
    await shows(code, "");
  },

  async "why nothing is shown is in the status bar"(code) {
    await code.press("Enter");
    await code.type("zzz");
    await says(code, "kvq: no completion: filtered");
    await code.page.click(`${STATUS} a`);
    await says(code, "kvq: switched off");
    await code.page.click(`${STATUS} a`);
    await ready(code);
  },

  async "a server that is killed comes back"(code) {
    await code.page.click(".editor-instance .view-lines");
    await code.press("Control", "End");
    await code.press("Enter");
    await code.type("gre");
    await shows(code, "et(name, loudly=True)");
    const before = readFileSync(pidFile, "utf8");
    process.kill(Number(before));
    await until(() => readFileSync(pidFile, "utf8") !== before, "another server");
    await code.type("e");
    await until(async () => {
      await code.type("t");
      await code.press("Backspace");
      return (await ghost(code)) === "t(name, loudly=True)";
    }, "ghost text of the other server");
  },

  async "brackets, line ends and places behind an emoji are exact"(code) {
    file("b.txt", "first\r\n\u{1f44b} caf\r\n\r\n");
    await open(code, "b.txt");
    await code.press("Control", "Home");
    await code.press("ArrowDown");
    await code.press("End");
    await code.press("Backspace");
    await code.type("f");
    await until(async () => (await ghost(code)).includes("\u00e9 = "), "an accent");
    await code.press("Tab");
    await code.press("Control", "End");
    await code.type("call(");
    await shows(code, "argument");
    await code.press("Tab");
    await lineIs(code, "call(argument)");
    await code.press("Control", "KeyS");
    const wanted = "first\r\n\u{1f44b} caf\u00e9 = '\u{1f44b}'\r\n\r\ncall(argument)";
    await until(() => readFileSync(join(folder, "b.txt"), "utf8") === wanted, "the file as saved");
  },

  async "a language can be left alone"(code) {
    file("c.md", "");
    file("c.txt", "");
    await open(code, "c.md");
    await code.type("gre");
    await says(code, "kvq: switched off for markdown");
    assert.equal(await ghost(code), "");
  },

  async "nothing popped up until now; a command that is missing does, once"(code) {
    assert.equal(await code.text(TOAST), "");
    await code.run("kvq: Explain the Last Completion");
    await until(async () => (await code.text(TOAST)).includes("kvq: no completion"), "the answer");
    await code.run("Notifications: Clear All Notifications");
    await until(async () => (await code.text(TOAST)) === "", "no notification");
    await open(code, "c.txt");
    await code.type("call(");
    await shows(code, "argument");
    await code.press("Tab");
    await lineIs(code, "call(argument)");
    await code.press("Control", "End");
    await code.press("Enter");
    await code.type("gre");
    await shows(code, "et(name, loudly=True)");
    await code.press("Control", "ArrowRight");
    await lineIs(code, "greet");
    change({ "kvq.path": "no-such-kvq" });
    await says(code, "kvq: the command no-such-kvq was not found");
    await until(async () => (await code.text(TOAST)).includes("set kvq.path"), "the message");
    assert.equal((await code.page.$$(TOAST)).length, 1);
  },
};

/** Opens a file in a fresh page, and waits until the extension has a server. */
async function open(code, name) {
  await code.openFile(name);
  await ready(code);
}

async function ready(code) {
  const not = ["", "kvq: switched off", "kvq: the server is starting"];
  await until(async () => !not.includes(await said(code)), "the extension with a server");
}

/** What the status bar says of kvq; nothing before the extension is there. */
function said(code) {
  const label = (of) => document.querySelector(of)?.getAttribute("aria-label") ?? "";
  return code.page.evaluate(label, STATUS);
}

/** The ghost text, which may be drawn in several pieces. */
async function ghost(code) {
  return (await code.text(GHOST)).replaceAll("|", "");
}

async function shows(code, wanted) {
  await until(async () => (await ghost(code)) === wanted, `ghost text "${wanted}"`);
}

async function says(code, wanted) {
  await until(async () => (await said(code)) === wanted, `"${wanted}"`);
}

/** Waits until a line of the document is this, without what is ghost text. */
async function lineIs(code, wanted) {
  const lines = () =>
    [...document.querySelectorAll(".view-line")].map((line) => {
      const own = [...line.querySelectorAll("span span")];
      const typed = own.filter((one) => !one.className.includes("ghost-text"));
      return typed.map((one) => one.textContent).join("").replaceAll("\u00a0", " ");
    });
  await until(async () => (await code.page.evaluate(lines)).includes(wanted), `line "${wanted}"`);
}

async function draw(code) {
  file("words.py", readFileSync(join(here, "words.txt"), "utf8"));
  await open(code, "words.py");
  await code.press("Control", "End");
  await code.type("        if line");
  await until(async () => (await ghost(code)) !== "", "ghost text");
  await code.page.screenshot({ path: picture });
}

prepare();
const code = await VisualStudioCode.open({
  server: install(process.env.KVQ_VSCODE ?? join(here, "../.vscode-server")),
  folder,
  data: join(data, "server"),
  extension: join(here, "../dist/kvq.vsix"),
  settings,
  environment: { FAKE_LSP_LOADS: loaded },
  chromium: process.env.KVQ_CHROMIUM ?? "/usr/bin/chromium",
});
try {
  if (picture) {
    await draw(code);
  } else {
    for (const [name, scenario] of Object.entries(scenarios)) {
      await scenario(code);
      console.log(`ok: ${name}`);
    }
  }
} catch (error) {
  await code.page.screenshot({ path: join(tmpdir(), "kvq-vscode-failed.png") });
  throw error;
} finally {
  await code.close();
  rmSync(data, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
}
