package sched

import "slices"

// Most jobs that wait go on waiting for the same reason, and there may be hundreds of thousands of them: only those whose reason may
// differ from the one that is shown are looked at.
//
// Invariant: a job that is not in View.loose shows its reason, as far as the passes have found it out. A job's reason depends on itself, or
// on its class's verdict and whether it is the first there. So a job becomes loose when it changes, when its time comes, when it is
// or was the first of its class; and all jobs of a class do when the verdict on those behind the first changes.

// loosen has a job looked at when changes are asked for.
func (v *View) loosen(j *job) {
	if !j.loose {
		j.loose = true
		v.loose = append(v.loose, j)
	}
}

// loosenClasses looks for classes whose jobs may have another reason than when they were looked at last.
func (v *View) loosenClasses() {
	for _, c := range v.classes {
		if !c.verdict.known {
			continue // What is shown holds until its turn.
		}
		if c.told != c.verdict.rest {
			for _, j := range c.queue {
				v.loosen(j)
			}
			c.told = c.verdict.rest
		}
		var head *job
		if c.cursor < len(c.queue) {
			head = c.queue[c.cursor]
			v.loosen(head) // Its sentence has numbers that change with every pass.
		}
		if c.head != nil && c.head != head {
			v.loosen(c.head)
		}
		c.head = head
	}
}

// Changes returns up to limit reasons that differ from those shown, by job id, lowest ids first, and whether there are more. Call it before
// the view changes. What it returns is returned again until it is shown: see Job.Shown. The time it takes grows with the number of
// classes and of jobs that changed, not with that of jobs that wait.
func (d *Decisions) Changes(limit int) (map[JobID]Reason, bool) {
	v := d.view
	v.loosenClasses()
	changed := map[JobID]Reason{}
	kept := v.loose[:0]
	for _, j := range v.loose {
		switch {
		case v.jobs[j.ID] != j: // It waits no more.
			j.loose = false
			continue
		case d.placed[j.ID], j.wake == 0 && !j.class.verdict.known: // It has no reason, or keeps what is shown, for the time being.
		default:
			r := d.reason(j)
			if r == j.Shown {
				j.loose = false
				continue
			}
			changed[j.ID] = r
		}
		kept = append(kept, j)
	}
	clear(v.loose[len(kept):])
	v.loose = kept
	if len(changed) <= limit {
		return changed, false
	}
	ids := make([]JobID, 0, len(changed))
	for id := range changed {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids[limit:] {
		delete(changed, id)
	}
	return changed, true
}
