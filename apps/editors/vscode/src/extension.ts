/** Starts `kvq lsp`, and lets it be switched, explained and restarted. */

import * as vscode from "vscode";
import { Server } from "./server";
import { commandLine, found, needsRestart } from "./settings";
import { outcome, Status } from "./status";

class Extension implements vscode.Disposable {
  readonly #status = new Status();
  readonly #log = vscode.window.createOutputChannel("kvq", { log: true });
  #server: Server | undefined;
  #on = true;
  /** Starts and stops come one after the other. */
  #turn: Promise<void> = Promise.resolve();

  restart(): Promise<void> {
    const turn = async () => {
      await this.#stop();
      if (this.#on) {
        await this.#start();
      }
    };
    this.#turn = this.#turn.then(turn).catch((error) => this.#log.error(String(error)));
    return this.#turn;
  }

  async toggle(): Promise<void> {
    this.#on = !this.#on;
    await this.restart();
    if (!this.#on) {
      this.#status.off();
    }
  }

  async explain(): Promise<void> {
    const document = vscode.window.activeTextEditor?.document;
    const report = document && this.#server ? await this.#server.explain(document) : null;
    void vscode.window.showInformationMessage(`kvq: ${outcome(report)}`);
  }

  async focus(editor: vscode.TextEditor | undefined): Promise<void> {
    await this.#server?.focus(editor);
  }

  showLog(): void {
    this.#log.show();
  }

  dispose(): void {
    this.#status.dispose();
    this.#log.dispose();
  }

  async stop(): Promise<void> {
    this.#on = false;
    await this.restart();
  }

  async #stop(): Promise<void> {
    const server = this.#server;
    this.#server = undefined;
    // A server that does not end in time is killed by the client, and says so by an error.
    await server?.stop().catch((error) => this.#log.warn(String(error)));
  }

  async #start(): Promise<void> {
    const asked = commandLine();
    const command = found(asked.command);
    if (command === undefined) {
      this.#status.stopped(`the command ${asked.command} was not found`);
      void missing(asked.command);
      return;
    }
    const server = new Server({ ...asked, command }, this.#status, this.#log);
    this.#server = server;
    await server.start();
  }
}

/** The one message of the extension: what is missing, and a button that leads there. */
async function missing(command: string): Promise<void> {
  const open = "Open Settings";
  const text = `kvq: the command "${command}" was not found. Install kvq, or set kvq.path.`;
  if ((await vscode.window.showWarningMessage(text, open)) === open) {
    await vscode.commands.executeCommand("workbench.action.openSettings", "kvq.path");
  }
}

let extension: Extension | undefined;

export function activate(context: vscode.ExtensionContext): void {
  const own = new Extension();
  extension = own;
  const commands: Record<string, () => unknown> = {
    toggleCompletion: () => own.toggle(),
    nextCompletion: () => run("editor.action.inlineSuggest.showNext"),
    previousCompletion: () => run("editor.action.inlineSuggest.showPrevious"),
    acceptWord: () => run("editor.action.inlineSuggest.acceptNextWord"),
    acceptLine: () => run("editor.action.inlineSuggest.acceptNextLine"),
    explainCompletion: () => own.explain(),
    restartServer: () => own.restart(),
    showLog: () => own.showLog(),
  };
  context.subscriptions.push(
    own,
    ...Object.entries(commands).map(([name, action]) =>
      vscode.commands.registerCommand(`kvq.${name}`, action),
    ),
    vscode.window.onDidChangeActiveTextEditor((editor) => own.focus(editor)),
    vscode.workspace.onDidChangeConfiguration((change) => {
      if (needsRestart(change)) {
        void own.restart();
      }
    }),
  );
  void own.restart();
}

export function deactivate(): Promise<void> | undefined {
  return extension?.stop();
}

function run(command: string): Thenable<unknown> {
  return vscode.commands.executeCommand(command);
}
