// The train program is a small data-parallel training: a two-layer network learns to read handwritten digits while several
// processes, each with its share of every batch, average their gradients over TCP.
//
// It stands in for a real training job wherever Muster must be shown to leave one alone: it is a gang (one lost peer
// stops all), it knows its progress (step number and loss), and it saves and resumes. It uses nothing of Muster but
// the environment that every launcher sets: RANK and WORLD_SIZE (or SLURM_PROCID and SLURM_NTASKS), MASTER_ADDR and
// MASTER_PORT.
//
// Invariants:
//   - The same seed, batch size and number of processes give the same parameters, bit for bit, also across a resume.
//   - All processes hold identical parameters after every step.
//   - A checkpoint's final name appears only when its contents are on disk. An incomplete file is never resumed from.
//   - A silent peer is an error within the timeout, never a hang.
package main
