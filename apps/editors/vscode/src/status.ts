/** The item in the status bar: how many suggestions there are, or why there is none. */

import * as vscode from "vscode";

/** What `kvq.explain` answers. */
export interface Report {
  readonly reusedTokens: number;
  readonly encodedTokens: number;
  readonly ms: number;
  readonly drafts: readonly { readonly text: string }[];
  readonly whyNot: string | null;
}

/** What the last completion of a document cost, or why there was none. */
export function outcome(report: Report | null): string {
  if (report === null) {
    return "no completion of this document was asked for";
  }
  if (report.whyNot !== null) {
    return `no completion: ${report.whyNot}`;
  }
  const cost = `reused ${report.reusedTokens} tokens, encoded ${report.encodedTokens}`;
  return `${report.drafts.length} suggestions; ${cost}, ${Math.round(report.ms)} ms`;
}

export class Status implements vscode.Disposable {
  readonly #item = vscode.window.createStatusBarItem("kvq", vscode.StatusBarAlignment.Right, 100);

  constructor() {
    this.#item.name = "kvq";
    this.#item.command = "kvq.toggleCompletion";
    this.#item.show();
  }

  /** `count` suggestions are shown. */
  drafts(count: number): void {
    this.#set(`$(sparkle) kvq ${count}`, `${count} suggestions; Alt+] and Alt+[ go through them`);
  }

  /** Nothing is shown, and why. */
  nothing(why: string): void {
    this.#set(why.includes("loading") ? "$(loading~spin) kvq" : "$(sparkle) kvq", why);
  }

  /** There is no server, and what to do. */
  stopped(why: string): void {
    this.#set("$(warning) kvq", why);
  }

  off(): void {
    this.#set("$(circle-slash) kvq", "switched off");
  }

  dispose(): void {
    this.#item.dispose();
  }

  #set(text: string, tooltip: string): void {
    this.#item.text = text;
    this.#item.tooltip = `kvq: ${tooltip}`;
    this.#item.accessibilityInformation = { label: this.#item.tooltip };
  }
}
