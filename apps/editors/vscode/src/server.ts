/** One `kvq lsp`: started, asked, watched. It never shows a pop-up by itself. */

import * as vscode from "vscode";
import {
  CloseAction,
  type CloseHandlerResult,
  ErrorAction,
  type ErrorHandler,
  InlineCompletionTriggerKind,
  LanguageClient,
  type Middleware,
  RevealOutputChannelOn,
  State,
} from "vscode-languageclient/node";
import { type CommandLine, enabledFor, readsOtherFiles, shownWhileTyping } from "./settings";
import { outcome, type Report, type Status } from "./status";

type Items = vscode.InlineCompletionItem[] | vscode.InlineCompletionList;

/** A server that ends more often than this within the window is broken. */
const MOST_RESTARTS = 3;
const RESTART_WINDOW_MS = 60_000;
/** How long a model that loads is left alone before it is asked again. */
const LOADING_MS = 500;

export class Server {
  readonly #status: Status;
  readonly #client: LanguageClient;
  #ends: number[] = [];

  constructor(command: CommandLine, status: Status, log: vscode.LogOutputChannel) {
    this.#status = status;
    this.#client = new LanguageClient("kvq", "kvq", command, {
      documentSelector: [{ scheme: "file" }, { scheme: "untitled" }, { scheme: "vscode-remote" }],
      initializationOptions: { completion: shownWhileTyping(), otherFiles: readsOtherFiles() },
      outputChannel: log,
      revealOutputChannelOn: RevealOutputChannelOn.Never,
      initializationFailedHandler: (error) => this.#failed(error),
      errorHandler: this.#errorHandler(),
      middleware: this.#middleware(),
    });
  }

  async start(): Promise<void> {
    this.#status.nothing("the server is starting");
    await this.#client.start();
    this.#status.nothing("nothing was asked for yet");
    await this.focus(vscode.window.activeTextEditor);
  }

  /** Tells the server where somebody is: it may read that document beforehand. */
  async focus(editor: vscode.TextEditor | undefined): Promise<void> {
    const wanted = editor && enabledFor(editor.document.languageId);
    if (wanted && this.#client.state === State.Running) {
      const { code2ProtocolConverter: converter } = this.#client;
      await this.#client.sendNotification(
        "textDocument/didFocus",
        converter.asTextDocumentPositionParams(editor.document, editor.selection.active),
      );
    }
  }

  async stop(): Promise<void> {
    if (this.#client.state !== State.Stopped) {
      await this.#client.stop();
    }
  }

  /** What the last completion of a document cost, or why there was none. */
  async explain(document: vscode.TextDocument): Promise<Report | null> {
    if (this.#client.state !== State.Running) {
      return null;
    }
    const uri = this.#client.code2ProtocolConverter.asUri(document.uri);
    return this.#client.sendRequest<Report | null>("workspace/executeCommand", {
      command: "kvq.explain",
      arguments: [uri],
    });
  }

  #middleware(): Middleware {
    return {
      provideInlineCompletionItems: async (document, position, context, token, next) => {
        if (!enabledFor(document.languageId)) {
          this.#status.nothing(`switched off for ${document.languageId}`);
          return null;
        }
        const items = (await next(document, position, context, token)) as Items | null | undefined;
        if (!token.isCancellationRequested) {
          await this.#tell(document, position, items);
        }
        return items;
      },
    };
  }

  /** Tells the status bar what came of a request. */
  async #tell(
    document: vscode.TextDocument,
    position: vscode.Position,
    items: Items | null | undefined,
  ): Promise<void> {
    const count = items ? (Array.isArray(items) ? items : items.items).length : 0;
    if (count > 0) {
      this.#status.drafts(count);
      return;
    }
    const report = await this.explain(document);
    this.#status.nothing(outcome(report));
    if (report?.whyNot?.includes("loading")) {
      this.#askOnceLoaded(document, position);
    }
  }

  /**
   * Lets the editor ask again where the cursor still stands, once there is a model. The editor would
   * not repeat a request that had an answer, so the server is asked here until it has another one.
   */
  #askOnceLoaded(document: vscode.TextDocument, position: vscode.Position): void {
    setTimeout(async () => {
      if (!standsAt(document, position) || this.#client.state !== State.Running) {
        return;
      }
      const { code2ProtocolConverter: converter } = this.#client;
      await this.#client.sendRequest("textDocument/inlineCompletion", {
        ...converter.asTextDocumentPositionParams(document, position),
        context: { triggerKind: InlineCompletionTriggerKind.Invoked },
      });
      if ((await this.explain(document))?.whyNot?.includes("loading")) {
        this.#askOnceLoaded(document, position);
      } else if (standsAt(document, position)) {
        await vscode.commands.executeCommand("editor.action.inlineSuggest.trigger");
      }
    }, LOADING_MS);
  }

  #failed(error: unknown): boolean {
    this.#status.stopped(`the server did not start: ${error}`);
    return false;
  }

  #errorHandler(): ErrorHandler {
    return {
      error: () => ({ action: ErrorAction.Continue, handled: true }),
      closed: () => this.#closed(),
    };
  }

  #closed(): CloseHandlerResult {
    const now = Date.now();
    this.#ends = [...this.#ends.filter((end) => now - end < RESTART_WINDOW_MS), now];
    if (this.#ends.length <= MOST_RESTARTS) {
      this.#status.nothing("the server ended and is started again");
      return { action: CloseAction.Restart, handled: true };
    }
    this.#status.stopped("the server ends again and again; its log says why");
    return { action: CloseAction.DoNotRestart, handled: true };
  }
}

function standsAt(document: vscode.TextDocument, position: vscode.Position): boolean {
  const editor = vscode.window.activeTextEditor;
  return editor?.document === document && editor.selection.active.isEqual(position);
}
