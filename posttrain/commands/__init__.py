"""The work behind the verbs of `posttrain` that are neither training nor a package of their own."""
