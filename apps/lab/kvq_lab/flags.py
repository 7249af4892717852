"""The flags that only the laboratory's suites and tasks take, beside `kvq_apps.flags.FLAGS`."""

from kvq_apps.flags import Flag

FLAGS: dict[str, Flag] = {
    "right": Flag("suite drafts with --shape: share of right guesses the model makes by itself",
        "{kvq_lab.drafting:DraftJob.right}", metavar="P"),
    "drafters": Flag("suite drafts: the drafters, as --draft has them (default: all but mtp)",
        metavar="POLICY,.."),
    "tasks": Flag("sweep: kld, passkey, retrieval, fim", "all", metavar="NAME,.."),
    "policies": Flag("sweep: NAME[:option=value,..][@K:V]", "every policy, at 8:8",
        metavar="POLICY,.."),
    "budgets": Flag("sweep: shares of the context's fp16 bytes", "{kvq_lab.sweep:BUDGETS}",
        metavar="SHARE,.."),
}  # fmt: skip
