// SPDX-License-Identifier: GPL-2.0
/*
 * The files tc/PORT/traffic_class below a device's sysfs directory, which the
 * out-of-tree mlx5 driver has: they read "Global tclass=N", take a number, keep
 * it across moves, and refuse writers outside the initial namespace.
 */
#include <linux/kobject.h>
#include <linux/nsproxy.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <net/net_namespace.h>

#include "rdmasim.h"

struct sim_tc_port {
	struct kobject kobj;
	int tclass;		/* -1: not set */
};

static ssize_t traffic_class_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	struct sim_tc_port *port = container_of(kobj, struct sim_tc_port, kobj);

	return sysfs_emit(buf, "Global tclass=%d\n", READ_ONCE(port->tclass));
}

static ssize_t traffic_class_store(struct kobject *kobj, struct kobj_attribute *attr,
				   const char *buf, size_t count)
{
	struct sim_tc_port *port = container_of(kobj, struct sim_tc_port, kobj);
	int value, err = kstrtoint(buf, 10, &value);

	if (err)
		return err;
	if (value < -1 || value > 255)
		return -EINVAL;
	if (current->nsproxy->net_ns != &init_net)
		return -EPERM;
	WRITE_ONCE(port->tclass, value);
	return count;
}

static struct kobj_attribute traffic_class = __ATTR_RW(traffic_class);

static struct attribute *sim_tc_attrs[] = { &traffic_class.attr, NULL };
ATTRIBUTE_GROUPS(sim_tc);

static void sim_tc_release(struct kobject *kobj)
{
	kfree(container_of(kobj, struct sim_tc_port, kobj));
}

static const struct kobj_type sim_tc_type = {
	.release = sim_tc_release,
	.sysfs_ops = &kobj_sysfs_ops,
	.default_groups = sim_tc_groups,
};

void sim_tc_remove(struct sim_ib *ib)
{
	unsigned int i;

	for (i = 0; i < SIM_MAX_PORTS; i++)
		if (ib->tc_port[i])
			kobject_put(&ib->tc_port[i]->kobj);
	kobject_put(ib->tc);	/* NULL is fine */
}

int sim_tc_add(struct sim_ib *ib)
{
	unsigned int i;
	int err;

	ib->tc = kobject_create_and_add("tc", &ib->ibdev.dev.kobj);
	if (!ib->tc)
		return -ENOMEM;
	for (i = 0; i < ib->ibdev.phys_port_cnt; i++) {
		struct sim_tc_port *port = kzalloc(sizeof(*port), GFP_KERNEL);

		if (!port) {
			err = -ENOMEM;
			goto undo;
		}
		port->tclass = -1;
		ib->tc_port[i] = port;
		err = kobject_init_and_add(&port->kobj, &sim_tc_type, ib->tc, "%u", i + 1);
		if (err)
			goto undo;
	}
	return 0;
undo:
	sim_tc_remove(ib);
	return err;
}
