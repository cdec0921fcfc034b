// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/rdmasim: one write is one command line, carried out before the write
 * returns; its error is the write's errno. A read lists the devices.
 *
 *   add key=value ...
 *   del NAME|ID|*
 *   fault NAME|ID|* remove-delay-ms=N | enable-errno=N
 *   port NAME|ID|* pkey=N | state=down|init|active
 */
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <net/net_namespace.h>

#include "rdmasim.h"

#define SIM_LINE_MAX	512
#define SIM_COUNT_MAX	4096

DEFINE_MUTEX(sim_lock);
LIST_HEAD(sims);
static unsigned int sim_next_id;

static void sim_put_parent(struct sim *sim)
{
	if (sim->spec.parent == SIM_PARENT_PCI)
		put_device(sim->parent);
	sim->parent = NULL;
}

static void sim_del(struct sim *sim)
{
	sim_unregister(sim);
	sim_put_parent(sim);
	if (sim->aux)
		sim_aux_destroy(sim->aux);
	list_del(&sim->entry);
	kfree(sim);
}

/* Calls from the PCI bus, under the device's own lock. */
void sim_parent_lost(struct device *parent)
{
	struct sim *sim, *next;

	mutex_lock(&sim_lock);
	list_for_each_entry_safe(sim, next, &sims, entry) {
		if (sim->parent != parent || sim->spec.parent != SIM_PARENT_PCI)
			continue;
		if (sim->spec.rebind) {
			sim_unregister(sim);
			sim_put_parent(sim);
		} else {
			sim_del(sim);
		}
	}
	mutex_unlock(&sim_lock);
}

void sim_parent_bound(struct device *parent)
{
	struct sim *sim;

	mutex_lock(&sim_lock);
	list_for_each_entry(sim, &sims, entry) {
		if (sim->spec.parent != SIM_PARENT_PCI || sim->parent ||
		    strcmp(sim->spec.parent_name, dev_name(parent)))
			continue;
		sim->parent = get_device(parent);
		if (sim_register(sim)) {
			dev_err(parent, "rdmasim: device %u did not come back\n", sim->id);
			sim_put_parent(sim);
		}
	}
	mutex_unlock(&sim_lock);
}

/* Fills the %d of an auxiliary device's name with the lowest number not in use. */
static int sim_aux_name(struct sim_spec *spec, const char *pattern)
{
	const char *d = strstr(pattern, "%d");
	struct sim *sim;
	unsigned int n;

	if (!d)
		return 0;
	for (n = 0; n < SIM_COUNT_MAX; n++) {
		bool taken = false;

		snprintf(spec->parent_name, sizeof(spec->parent_name), "%.*s%u%s",
			 (int)(d - pattern), pattern, n, d + 2);
		list_for_each_entry(sim, &sims, entry)
			if (sim->aux && !strcmp(sim->spec.parent_name, spec->parent_name)) {
				taken = true;
				break;
			}
		if (!taken)
			return 0;
	}
	return -ENOSPC;
}

static int sim_add_locked(const struct sim_spec *spec, struct device *pci)
{
	struct sim *sim = kzalloc(sizeof(*sim), GFP_KERNEL);
	int err;

	if (!sim)
		return -ENOMEM;
	sim->id = sim_next_id++;
	sim->spec = *spec;
	switch (spec->parent) {
	case SIM_PARENT_PCI:
		strscpy(sim->spec.parent_name, dev_name(pci), sizeof(sim->spec.parent_name));
		sim->parent = get_device(pci);
		break;
	case SIM_PARENT_AUX:
		err = sim_aux_name(&sim->spec, spec->parent_name);
		if (err)
			goto free;
		sim->aux = sim_aux_create(sim->spec.parent_name, spec->netdev, sim->id);
		if (IS_ERR(sim->aux)) {
			err = PTR_ERR(sim->aux);
			goto free;
		}
		sim->parent = &sim->aux->adev.dev;
		break;
	case SIM_PARENT_NONE:
		break;
	}
	err = sim_register(sim);
	if (err)
		goto parent;
	list_add_tail(&sim->entry, &sims);
	return 0;

parent:
	sim_put_parent(sim);
	if (sim->aux)
		sim_aux_destroy(sim->aux);
free:
	kfree(sim);
	return err;
}

/* All of them or none. */
static int sim_add_many(const struct sim_spec *spec, unsigned int count, struct device *pci)
{
	unsigned int first, i;
	struct sim *sim, *next;
	int err = 0;

	mutex_lock(&sim_lock);
	first = sim_next_id;
	for (i = 0; i < count && !err; i++)
		err = sim_add_locked(spec, pci);
	if (err)
		list_for_each_entry_safe(sim, next, &sims, entry)
			if (sim->id >= first)
				sim_del(sim);
	mutex_unlock(&sim_lock);
	return err;
}

/* Holding the function's lock keeps its driver bound until the device is there. */
static int sim_add_pci(const struct sim_spec *spec, unsigned int count)
{
	struct device *pci = sim_pci_get(spec->parent_name);
	int err;

	if (!pci)
		return -ENODEV;
	device_lock(pci);
	err = pci->driver ? sim_add_many(spec, count, pci) : -ENXIO;
	device_unlock(pci);
	put_device(pci);
	return err;
}

/* At most one conversion, and only %d: ib_core formats the name with it. */
static bool sim_pattern_ok(const char *s)
{
	const char *p = strchr(s, '%');

	return *s && !strchr(s, '/') && (!p || (p[1] == 'd' && !strchr(p + 1, '%')));
}

static int sim_parse_bool(const char *value, bool *out)
{
	if (strcmp(value, "0") && strcmp(value, "1"))
		return -EINVAL;
	*out = *value == '1';
	return 0;
}

static int sim_parse_choice(const char *value, const char *off, const char *on, bool *out)
{
	if (strcmp(value, off) && strcmp(value, on))
		return -EINVAL;
	*out = !strcmp(value, on);
	return 0;
}

static int sim_parse_number(const char *value, unsigned int max, unsigned int *out)
{
	int err = kstrtouint(value, 10, out);

	return err ? err : *out < 1 || *out > max ? -EINVAL : 0;
}

static int sim_parse_pkey(const char *value, unsigned int *out)
{
	int err = kstrtouint(value, 0, out);

	return err ? err : *out < 1 || *out > 0xffff ? -EINVAL : 0;
}

static int sim_parse_state(const char *value, unsigned int *out)
{
	static const struct { const char *name; unsigned int state; } states[] = {
		{ "down", IB_PORT_DOWN }, { "init", IB_PORT_INIT }, { "active", IB_PORT_ACTIVE },
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(states); i++) {
		if (!strcmp(value, states[i].name)) {
			*out = states[i].state;
			return 0;
		}
	}
	return -EINVAL;
}

static int sim_parse_parent(struct sim_spec *spec, const char *value)
{
	if (!strcmp(value, "none")) {
		spec->parent = SIM_PARENT_NONE;
		return 0;
	}
	if (!strncmp(value, "pci:", 4))
		spec->parent = SIM_PARENT_PCI;
	else if (!strncmp(value, "aux:", 4))
		spec->parent = SIM_PARENT_AUX;
	else
		return -EINVAL;
	if (strscpy(spec->parent_name, value + 4, sizeof(spec->parent_name)) < 0)
		return -ENAMETOOLONG;
	return sim_pattern_ok(spec->parent_name) ? 0 : -EINVAL;
}

static int sim_parse_key(struct sim_spec *spec, unsigned int *count,
			 const char *key, const char *value)
{
	if (!strcmp(key, "name"))
		return strscpy(spec->name, value, sizeof(spec->name)) < 0 ? -ENAMETOOLONG : 0;
	if (!strcmp(key, "parent"))
		return sim_parse_parent(spec, value);
	if (!strcmp(key, "count"))
		return sim_parse_number(value, SIM_COUNT_MAX, count);
	if (!strcmp(key, "ports"))
		return sim_parse_number(value, SIM_MAX_PORTS, &spec->ports);
	if (!strcmp(key, "pkey"))
		return sim_parse_pkey(value, &spec->pkey);
	if (!strcmp(key, "link"))
		return sim_parse_choice(value, "eth", "ib", &spec->ib_link);
	if (!strcmp(key, "guid"))
		return sim_parse_choice(value, "auto", "zero", &spec->zero_guid);
	if (!strcmp(key, "movable"))
		return sim_parse_bool(value, &spec->movable);
	if (!strcmp(key, "driver"))
		return sim_parse_choice(value, "rxe", "none", &spec->anonymous);
	if (!strcmp(key, "netdev"))
		return sim_parse_bool(value, &spec->netdev);
	if (!strcmp(key, "rebind"))
		return sim_parse_bool(value, &spec->rebind);
	if (!strcmp(key, "tc"))
		return sim_parse_bool(value, &spec->tc);
	return -EINVAL;
}

static int sim_cmd_add(char *args)
{
	struct sim_spec spec = { .name = "rdmasim%d", .ports = 1, .pkey = 0xffff, .movable = true };
	unsigned int count = 1;
	char *word;
	int err;

	while ((word = strsep(&args, " \t"))) {
		char *value = strchr(word, '=');

		if (!*word)
			continue;
		if (!value)
			return -EINVAL;
		*value++ = '\0';
		err = sim_parse_key(&spec, &count, word, value);
		if (err)
			return err;
	}
	if (!sim_pattern_ok(spec.name) ||
	    (spec.netdev && (spec.parent != SIM_PARENT_AUX || spec.ib_link)) ||
	    (spec.rebind && (spec.parent != SIM_PARENT_PCI || count > 1)))
		return -EINVAL;
	return spec.parent == SIM_PARENT_PCI ? sim_add_pci(&spec, count) :
					       sim_add_many(&spec, count, NULL);
}

static bool sim_matches(const struct sim *sim, const char *which)
{
	unsigned int id;

	if (!strcmp(which, "*"))
		return true;
	if (!kstrtouint(which, 10, &id))
		return sim->id == id;
	return sim->ib && !strcmp(sim->ib->ibdev.name, which);
}

/* Names can repeat from one namespace to the next on newer kernels. */
static int sim_check_which(const char *which)
{
	unsigned int n = 0;
	struct sim *sim;

	if (!which || !*which)
		return -EINVAL;
	list_for_each_entry(sim, &sims, entry)
		n += sim_matches(sim, which);
	if (!strcmp(which, "*"))
		return 0;
	return n == 1 ? 0 : n ? -ENOTUNIQ : -ENODEV;
}

static int sim_cmd_del(char *args)
{
	struct sim *sim, *next;
	char *which = args ? strim(args) : NULL;
	int err;

	mutex_lock(&sim_lock);
	err = sim_check_which(which);
	if (!err)
		list_for_each_entry_safe(sim, next, &sims, entry)
			if (sim_matches(sim, which))
				sim_del(sim);
	mutex_unlock(&sim_lock);
	return err;
}

static int sim_cmd_fault(char *args)
{
	char *which = strsep(&args, " \t");
	char *key = args ? strim(args) : NULL;
	char *value = key ? strchr(key, '=') : NULL;
	unsigned int n;
	bool delay;
	struct sim *sim;
	int err;

	if (!value)
		return -EINVAL;
	*value++ = '\0';
	err = sim_parse_choice(key, "enable-errno", "remove-delay-ms", &delay);
	if (!err)
		err = sim_parse_number(value, delay ? 600000 : MAX_ERRNO, &n);
	if (err)
		return err;

	mutex_lock(&sim_lock);
	err = sim_check_which(which);
	if (!err)
		list_for_each_entry(sim, &sims, entry)
			if (sim->ib && sim_matches(sim, which))
				atomic_set(delay ? &sim->ib->remove_delay_ms :
						   &sim->ib->enable_errno, n);
	mutex_unlock(&sim_lock);
	return err;
}

/* What a subnet manager does to an InfiniBand port, and the event that follows. */
static void sim_set_port(struct sim_ib *ib, bool state, unsigned int value)
{
	struct ib_event event = { .device = &ib->ibdev };
	unsigned int port;

	if (state) {
		WRITE_ONCE(ib->ib_state, value);
		event.event = value == IB_PORT_ACTIVE ? IB_EVENT_PORT_ACTIVE : IB_EVENT_PORT_ERR;
	} else {
		WRITE_ONCE(ib->pkey, value);
		event.event = IB_EVENT_PKEY_CHANGE;
	}
	for (port = 1; port <= ib->ibdev.phys_port_cnt; port++) {
		event.element.port_num = port;
		ib_dispatch_event(&event);
	}
}

static int sim_cmd_port(char *args)
{
	char *which = strsep(&args, " \t");
	char *key = args ? strim(args) : NULL;
	char *value = key ? strchr(key, '=') : NULL;
	struct sim *sim;
	unsigned int n;
	bool state;
	int err;

	if (!value)
		return -EINVAL;
	*value++ = '\0';
	err = sim_parse_choice(key, "pkey", "state", &state);
	if (!err)
		err = state ? sim_parse_state(value, &n) : sim_parse_pkey(value, &n);
	if (err)
		return err;

	mutex_lock(&sim_lock);
	err = sim_check_which(which);
	if (!err)
		list_for_each_entry(sim, &sims, entry)
			if (sim->ib && sim->spec.ib_link && sim_matches(sim, which))
				sim_set_port(sim->ib, state, n);
	mutex_unlock(&sim_lock);
	return err;
}

static int sim_command(char *line)
{
	char *args = strim(line);
	char *verb = strsep(&args, " \t");

	if (!strcmp(verb, "add"))
		return sim_cmd_add(args);
	if (!strcmp(verb, "del"))
		return sim_cmd_del(args);
	if (!strcmp(verb, "fault"))
		return sim_cmd_fault(args);
	if (!strcmp(verb, "port"))
		return sim_cmd_port(args);
	return -EINVAL;
}

static ssize_t sim_write(struct file *file, const char __user *buf, size_t len, loff_t *pos)
{
	char *line;
	int err;

	if (len > SIM_LINE_MAX)
		return -E2BIG;
	line = memdup_user_nul(buf, len);
	if (IS_ERR(line))
		return PTR_ERR(line);
	err = sim_command(line);
	kfree(line);
	return err ? err : len;
}

static void sim_show_ib(struct seq_file *m, struct sim_ib *ib)
{
	struct net_device *ndev;
	unsigned int netns;

	rcu_read_lock();
	ndev = rcu_dereference(ib->ndev[0]);
	netns = read_pnet(&ib->ibdev.coredev.rdma_net)->ns.inum;
	seq_printf(m, " name=%s index=%u netns=%u netdev=%s remove-delay-ms=%d enable-errno=%d",
		   ib->ibdev.name, ib->ibdev.index, netns, ndev ? ndev->name : "-",
		   atomic_read(&ib->remove_delay_ms), atomic_read(&ib->enable_errno));
	rcu_read_unlock();
}

static int sim_show(struct seq_file *m, void *unused)
{
	static const char * const kind[] = { "none", "pci:", "aux:" };
	struct sim *sim;

	mutex_lock(&sim_lock);
	list_for_each_entry(sim, &sims, entry) {
		seq_printf(m, "id=%u", sim->id);
		if (sim->ib)
			sim_show_ib(m, sim->ib);
		else
			seq_puts(m, " name=- waits for its function's driver");
		seq_printf(m, " parent=%s%s ports=%u link=%s movable=%d rebind=%d\n",
			   kind[sim->spec.parent], sim->spec.parent_name, sim->spec.ports,
			   sim->spec.ib_link ? "ib" : "eth", sim->spec.movable,
			   sim->spec.rebind);
	}
	mutex_unlock(&sim_lock);
	return 0;
}

static int sim_open(struct inode *inode, struct file *file)
{
	file->private_data = NULL;	/* misc_open() leaves the miscdevice there */
	return single_open(file, sim_show, NULL);
}

static const struct file_operations sim_fops = {
	.owner = THIS_MODULE,
	.open = sim_open,
	.read = seq_read,
	.write = sim_write,
	.llseek = seq_lseek,
	.release = single_release,
};

static struct miscdevice sim_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = KBUILD_MODNAME,
	.fops = &sim_fops,
	.mode = 0600,
};

static int __init sim_init(void)
{
	int err = sim_client_init();

	if (err)
		return err;
	err = sim_parent_init();
	if (err)
		goto client;
	err = misc_register(&sim_misc);
	if (err)
		goto parent;
	return 0;

parent:
	sim_parent_exit();
client:
	sim_client_exit();
	return err;
}

static void __exit sim_exit(void)
{
	struct sim *sim, *next;

	misc_deregister(&sim_misc);
	mutex_lock(&sim_lock);
	list_for_each_entry_safe(sim, next, &sims, entry)
		sim_del(sim);
	mutex_unlock(&sim_lock);
	sim_parent_exit();
	sim_client_exit();
}

module_init(sim_init);
module_exit(sim_exit);
MODULE_DESCRIPTION("RDMA devices without RDMA hardware, for tests");
MODULE_LICENSE("GPL");
