"""Training toolkit: from a target model and prompts to an EAGLE-3 head that SGLang loads."""
