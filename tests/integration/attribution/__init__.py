"""Who is to blame, row by row of the contract's table of reasons, through the real service, real agents and real slots.

| row | what | where |
|---|---|---|
| `exit` | 0, n, 128+n, an own 137, a kill inside that the command survives | `test_commands` |
| `timeout`, `no_output_timeout` | deaf to SIGTERM, forked twice; an agent or a whole sandbox that stood still meanwhile | `test_commands`, `test_infra` |
| `oom` | in a child, in the shell itself, of the init (`test_masking`); `ambiguous` if other slots helped | `test_commands`; also `agent/test_evidence` |
| `resource_limit` | processes, size of a file; by file tools too | `test_commands` |
| `invalid_args`, `tool_error` | every tool | `test_rows`; also `agent_tools`, `hostile/test_hard_commands` |
| `not_implemented` | an agent that does not know what it is asked for | `unit/dispatch`; also `contract/test_recorded` |
| `cancelled` | by the caller, by a release | `test_rows`; also `contract/test_verbs` |
| `lease_lost`, `call_conflict` | unknown, released, expired; other arguments | `test_rows`; also `contract/test_verbs`, `contract/tenants/test_tenants` |
| `sandbox_lost`, infra | agent killed, told to end, killed with all it runs; init killed; service away meanwhile | `test_infra` |
| `sandbox_lost`, policy | own work, for that lease alone | `test_masking` |
| `backend_error` | could not be started, unproven: `test_masking`; agent out of reach | `test_masking`; also `unit/dispatch` |

What a slot can do to have its failures taken for ours, or its neighbours for them, is in `test_masking` and in `hostile/test_interference`.
Long silences of an agent (20 s and more) are in the crash harness, `tests/faults`.
"""
