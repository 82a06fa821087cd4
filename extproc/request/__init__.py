"""From request bytes to InferenceRequest, and edits as splices."""
