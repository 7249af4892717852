/** What a user has set, and the command line it makes. */

import { accessSync, constants, statSync } from "node:fs";
import { delimiter, isAbsolute, join } from "node:path";
import * as vscode from "vscode";

export interface CommandLine {
  readonly command: string;
  readonly args: string[];
}

/** The command line of the language server. */
export function commandLine(): CommandLine {
  const settings = vscode.workspace.getConfiguration("kvq");
  const model = settings.get<string>("model", "");
  return {
    command: settings.get<string>("path", "kvq"),
    args: [
      "lsp",
      "--drafts",
      String(settings.get<number>("drafts", 3)),
      ...(model === "" ? [] : ["--model", model]),
      ...settings.get<string[]>("arguments", []),
    ],
  };
}

/** What the server is to show while somebody types: `likely`, `always` or `off`. */
export function shownWhileTyping(): string {
  return vscode.workspace.getConfiguration("kvq").get<string>("completion", "likely");
}

/** Whether the server reads parts of other open files before it completes. */
export function readsOtherFiles(): boolean {
  return vscode.workspace.getConfiguration("kvq").get<boolean>("otherFiles", true);
}

/** Whether kvq is to complete texts of this language. */
export function enabledFor(language: string): boolean {
  const rules = vscode.workspace.getConfiguration("kvq").get<Record<string, boolean>>("enable", {});
  return rules[language] ?? rules["*"] ?? true;
}

/** Whether a change of these settings asks for another server. */
export function needsRestart(change: vscode.ConfigurationChangeEvent): boolean {
  return ["path", "model", "drafts", "completion", "otherFiles", "arguments"].some((name) =>
    change.affectsConfiguration(`kvq.${name}`),
  );
}

/** Where an executable is: as it stands there, or on the path; nothing where it is not. */
export function found(command: string): string | undefined {
  if (isAbsolute(command) || command.includes("/") || command.includes("\\")) {
    return runs(command) ? command : undefined;
  }
  const endings = process.platform === "win32" ? [".exe", ".cmd", ""] : [""];
  return (process.env["PATH"] ?? "")
    .split(delimiter)
    .flatMap((folder) => endings.map((ending) => join(folder, command + ending)))
    .find(runs);
}

function runs(file: string): boolean {
  try {
    accessSync(file, constants.X_OK);
    return statSync(file).isFile();
  } catch {
    return false;
  }
}
