"""The flags that the laboratory's suites and tasks take, beside `kvq_apps.settings.flags`."""

from kvq_apps.settings.flags import Flag

FLAGS: dict[str, Flag] = {
    "right": Flag("suite drafts with --shape: share of right guesses the model makes by itself",
        "{kvq_lab.drafting:DraftJob.right}", metavar="P"),
    "drafters": Flag("suite drafts: the drafters, as --draft has them (default: all but mtp)",
        metavar="POLICY,.."),
    "limit": Flag("lines to fill in, problems to solve, edits, hunks or places at most",
        "{kvq_lab.eval:DEFAULT_LIMIT}; drafts: {kvq_lab.eval:DRAFTS_PLACES}", metavar="N"),
    "execute": Flag("run the tests of lines and programs that a model wrote, no sandbox",
        switch=True),
    "other-files": Flag("fim: parts of the other files stand in front of each prompt, as `kvq lsp` "
        "chooses them", switch=True),
    "git": Flag("replay: the files that the last commits of this repository changed",
        metavar="FOLDER"),
    "only": Flag("replay: files whose names match, such as *.py", "all", metavar="PATTERN"),
    "pause": Flag("replay: when a completion is asked for: after each word, bracket and line end "
        "(word), after each line end (line), or after each key", "word",
        choices=("word", "line", "key")),
    "plot": Flag("draw the results", metavar="FILE.png"),
    "tasks": Flag("sweep: kld, passkey, retrieval", "all", metavar="NAME,.."),
    "policies": Flag("sweep: NAME[:option=value,..][@K:V]", "every policy, at 8:8",
        metavar="POLICY,.."),
    "budgets": Flag("sweep: shares of the context's fp16 bytes", "{kvq_lab.sweep:BUDGETS}",
        metavar="SHARE,.."),
}  # fmt: skip
