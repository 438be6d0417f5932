"""Claims that wait for what they are about, with their arithmetic."""

from benchmarks.claim_families.finding import Family, Finding, Inputs, Report

SMALLER = {
    "int8": "int8 halves the KV cache",
    "int4": "int4 saves 75 % of it",
    "window": "a window saves 90 %",
    "h2o": "H2O saves 90 % at less than 2 % of perplexity",
}


def measure_smaller(inputs: Inputs) -> Report:
    waits = "waits for smaller caches"
    findings = {
        "int8": Finding("50 %, less a scale of 2 bytes for each head of 128: 49 %", waits),
        "int4": Finding("75 %, less the scales: 74 %", waits),
        "window": Finding("1 - window / context: 87.5 % with 4,096 of 32,768, 90 % from 40,960 on", waits),
        "h2o": Finding("90 % with a tenth of the tokens kept; perplexity has no arithmetic", waits),
    }
    return Report("Nothing was run.", findings)


SMALLER_CACHES = Family("Smaller caches", SMALLER, measure_smaller)
